"""What is computed on registers: elementwise functions, and reductions over a row."""
