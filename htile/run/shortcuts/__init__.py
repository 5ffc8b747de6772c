"""Calls that repeat: each kind leaves a small function behind, a *shortcut*, for calls like it.

`shortcut.py` makes and keeps them, and `text.py` writes what all of them have. The others write
what is special to `out=`, gradients, products and the operations of torch's graphs.
"""
