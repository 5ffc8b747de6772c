"""From a call of a row-wise function to a launch.

Each call goes through the modules here. The packages serve kinds of calls: those that repeat
(`shortcuts`), are differentiated (`differentiation`), become part of torch's graphs (`operations`),
or multiply by matrices (`products`).
"""
