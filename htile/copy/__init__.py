"""How the tiles of a row move between global memory, shared memory and registers."""
