"""What is computed on registers: reductions, and elementwise device functions."""
