"""Register tiles, which view the values that a thread holds."""
