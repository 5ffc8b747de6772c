"""Tiles in global memory, in shared memory and in registers: where each element is."""
