"""Canonical numbers: weights, data and dropout decisions that any language can rebuild bit for bit.

The whole definition (64-bit unsigned arithmetic, wrapping):

    mix(z):       z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                  z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                  return z ^ (z >> 31)
    hash(name):   FNV-1a over the UTF-8 bytes of the name
    word(i):      mix(mix(seed ^ hash(name)) + (i + 1) * 0x9E3779B97F4A7C15)
    real(i):      (word(i) >> 40) - 2**23, divided by 2**23: 24 bits in [-1, 1)
    ternary(i):   (word(i) >> 32) % 3 - 1: one of -1, 0, 1

Source: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014);
FNV-1a (Fowler, Noll, Vo). No transcendental function is involved, and every scale is a power of two.
"""

from __future__ import annotations

import math

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hash(name: str) -> int:
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def words(seed: int, name: str, count: int) -> np.ndarray:
    """The first `count` 64-bit words of the stream (seed, name): uint64 array of shape (count,)."""
    with np.errstate(over="ignore"):
        key = _mix(np.array([(seed ^ _hash(name)) & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
        return _mix(key + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def real(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 array in [-1, 1) whose values have 24 bits, so that float32 holds them exactly."""
    top = words(seed, name, math.prod(shape)) >> np.uint64(40)
    return ((top.astype(np.int64) - 2**23) / 2.0**23).reshape(shape)


def ternary(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 array of -1, 0 and 1: the numbers of the exact lane."""
    drawn = (words(seed, name, math.prod(shape)) >> np.uint64(32)) % np.uint64(3)
    return (drawn.astype(np.int64) - 1).astype(np.float64).reshape(shape)


def integers(seed: int, name: str, count: int, below: int) -> np.ndarray:
    """int64 array of shape (count,) with values in [0, below)."""
    return ((words(seed, name, count) >> np.uint64(32)) % np.uint64(below)).astype(np.int64)


def ranking(seed: int, name: str, count: int) -> np.ndarray:
    """A permutation of range(count): the order of the stream's words (stable)."""
    return np.argsort(words(seed, name, count), kind="stable")
