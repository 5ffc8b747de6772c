"""Random numbers for references in float64: Philox4x32-10 by numpy, in unsigned integers.

Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

import numpy as np
import torch

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def uniform(seed: torch.Tensor, n: int, subsequence: torch.Tensor | None = None) -> torch.Tensor:
    """(w + 0.5) / 2 ** 32 in float64 for n words w: the four of counter 0, those of counter 1...

    seed: int64, one a row; the result has an axis of n more. subsequence: the upper half of the
    counter, one a row; 0 without.
    """
    key = seed.cpu().numpy().astype(np.uint64)[..., None]
    above = np.zeros_like(key)
    if subsequence is not None:
        above = subsequence.cpu().numpy().astype(np.uint64)[..., None]
    count = -(-n // 4)
    counter = np.broadcast_to(np.arange(count, dtype=np.uint64), (*key.shape[:-1], count))
    words = [counter & LOW, counter >> HALF, above & LOW, above >> HALF]
    keys = [key & LOW, key >> HALF]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> HALF) ^ words[1] ^ keys[0], second & LOW,
            (first >> HALF) ^ words[3] ^ keys[1], first & LOW,
        ]  # fmt: skip
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & LOW, (keys[1] + np.uint64(0xBB67AE85)) & LOW]
    found = np.stack(np.broadcast_arrays(*words), -1).reshape(*key.shape[:-1], -1)[..., :n]
    return torch.from_numpy((found.astype(np.float64) + 0.5) / 2**32).to(seed.device)
