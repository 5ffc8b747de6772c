"""From a call of a row-wise function to a launch.

What each call goes through are the modules here. Packages have kinds of calls: those that repeat
(`shortcuts`), are differentiated (`differentiation`), are in torch's graphs (`operations`), or
multiply by matrices (`products`).
"""
