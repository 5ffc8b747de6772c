"""Where tensors lie in memory: which bytes they span, and whether two of them share any."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

import torch

MOST_STEPS = 20_000  # of the search for a common byte; beyond them two tensors count as having one


def layout(tensor: torch.Tensor) -> tuple:
    """What is equal for tensors that are exactly the same elements of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements. Strides of dimensions of size 1 do not count."""
    if (a.data_ptr(), a.dtype, a.shape) != (b.data_ptr(), b.dtype, b.shape):
        return False
    both = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in both)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first byte of a tensor that has elements to the end of its last element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.element_size()


def are_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all of one tensor lies before all of the other."""
    first, second = a.data_ptr(), b.data_ptr()
    return first + extent(a) <= second or second + extent(b) <= first


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may have one address."""
    reach = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common.

    It is exact, except that it may wrongly say so for tensors of many crossing strides.
    """
    if not (_has_memory(a) and _has_memory(b)) or a.device != b.device:
        return False  # refused elsewhere
    if a.numel() == 0 or b.numel() == 0 or a.device.type == "meta":
        return False
    return not are_disjoint(a, b) and _meet(a, b)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has addresses: sparse and nested tensors have none, nor those of torch.func."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and torch._C._has_storage(tensor)


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a byte of `a` is a byte of `b`.

    Byte u of element i of `a` lies at its address + i * stride + u, and so for `b`. They meet where
    the sum over dimensions of i * stride, less that of `b`, and u - v is the distance of the two.
    Counting the indices of `b` from the other end makes it a sum of steps, each taken from 0 to
    some number of times, that must reach a `goal`. What the steps from the k-th on can reach is a
    multiple of their greatest common divisor and at most their total.
    """
    most: Counter[int] = Counter({1: a.element_size() + b.element_size() - 2})  # times of a step
    for tensor in (a, b):
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True):
            most[stride * tensor.element_size()] += length - 1
    steps = sorted((step for step, times in most.items() if step and times), reverse=True)
    gcds = [*accumulate(reversed(steps), math.gcd)][::-1]
    totals = [*accumulate((step * most[step] for step in reversed(steps)), initial=0)][::-1]
    left = MOST_STEPS

    def reaches(goal: int, k: int) -> bool:
        nonlocal left
        left -= 1
        if goal == 0 or left < 0:
            return True
        if not 0 < goal <= totals[k] or goal % gcds[k]:
            return False
        step = steps[k]
        fewest = max(0, -(-(goal - totals[k + 1]) // step))
        times = range(min(most[step], goal // step), fewest - 1, -1)
        return any(reaches(goal - step * n, k + 1) for n in times)

    return reaches(b.data_ptr() - a.data_ptr() + extent(b) - 1, 0)
