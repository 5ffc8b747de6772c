"""Views of the values that a thread holds."""
