"""Orders that are computed where they are needed and never stored: a random permutation, and the turns of a mixture."""

import hashlib
from fractions import Fraction

import numpy as np


def permute(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """A random permutation of range(n) at the given indices, in O(1) memory: a Feistel network over the next power of
    four, applied again to what falls outside (cycle walking, Black and Rogaway 2002)."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u8")
    out = index.astype(np.uint64)
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        x = out[todo]
        left, right = x >> half, x & mask
        for k in keys:
            z = right + k  # splitmix64's mixing, modulo 2^64
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & mask)
        out[todo] = left << half | right
        todo = out >= n
    return out.astype(np.int64)


def turns(index: np.ndarray, weights: list[Fraction]) -> tuple[np.ndarray, np.ndarray]:
    """Whose turn it is at the given places of a mixture -> (source, its how manyeth turn from 0). Of the first n places
    a source of weight w has n w, to less than one turn per source that comes before it, for every n."""
    source, number = np.zeros_like(index), index.copy()
    if len(weights) == 1:
        return source, number
    open_, left = np.arange(len(index)), sum(weights, Fraction(0))
    for i, weight in enumerate(weights):
        share = (weight / left).limit_denominator(2**30) if left else Fraction(1)
        n, d = share.numerator, share.denominator
        rest = number[open_]
        before = rest // d * n + rest % d * n // d  # floor(rest n / d), whose products fit 64 bits
        mine = (rest % d + 1) * n // d > rest % d * n // d
        source[open_[mine]], number[open_[mine]] = i, before[mine]
        number[open_[~mine]] = (rest - before)[~mine]
        open_, left = open_[~mine], left - weight
    return source, number
