"""Canonical numbers are what their ten-line definition says, in integers of any language."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivtests.cases import numbers

WRAP = 2**64
SEEDS = st.integers(0, WRAP - 1)
NAMES = st.text(max_size=12)


# ------------------------------------------------------- the definition once more, in unbounded integers


def mixed(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WRAP
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WRAP
    return z ^ z >> 31


def hashed(name: str) -> int:
    """FNV-1a with the published offset basis and prime, in decimal."""
    value = 14695981039346656037
    for byte in name.encode("utf-8"):
        value = (value ^ byte) * 1099511628211 % WRAP
    return value


def word(seed: int, name: str, i: int) -> int:
    return mixed((mixed(seed ^ hashed(name)) + (i + 1) * 0x9E3779B97F4A7C15) % WRAP)


def real(seed: int, name: str, i: int) -> Fraction:
    return Fraction((word(seed, name, i) >> 40) - 2**23, 2**23)


def ternary(seed: int, name: str, i: int) -> int:
    return (word(seed, name, i) >> 32) % 3 - 1


# ------------------------------------------------------------------------------------------------- tests


def test_the_mix_is_that_of_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0, as they stand in the test vectors of other libraries."""
    golden = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mixed((i + 1) * golden % WRAP) for i in range(3)] == published


def test_the_hash_is_fnv_1a() -> None:
    """Published vectors of 64-bit FNV-1a."""
    published = {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "foobar": 0x85944171F73967E8}
    assert {name: hashed(name) for name in published} == published


@given(SEEDS, NAMES)
def test_words_are_those_of_the_definition(seed: int, name: str) -> None:
    assert numbers.words(seed, name, 5).tolist() == [word(seed, name, i) for i in range(5)]


@given(SEEDS, NAMES)
def test_reals_are_those_of_the_definition_and_float32_holds_them(seed: int, name: str) -> None:
    drawn = numbers.real(seed, name, (2, 3))
    assert drawn.dtype == np.float64 and drawn.shape == (2, 3)
    assert [Fraction(x) for x in drawn.ravel().tolist()] == [real(seed, name, i) for i in range(6)]
    assert np.array_equal(drawn.astype(np.float32).astype(np.float64), drawn)
    assert drawn.min() >= -1 and drawn.max() < 1


@given(SEEDS, NAMES)
def test_ternaries_are_those_of_the_definition(seed: int, name: str) -> None:
    drawn = numbers.ternary(seed, name, (3, 2))
    assert drawn.dtype == np.float64
    assert drawn.ravel().tolist() == [ternary(seed, name, i) for i in range(6)]


@given(SEEDS, NAMES, st.integers(1, 300))
def test_integers_are_those_of_the_definition(seed: int, name: str, below: int) -> None:
    drawn = numbers.integers(seed, name, 6, below)
    assert drawn.dtype == np.int64
    assert drawn.tolist() == [(word(seed, name, i) >> 32) % below for i in range(6)]


@given(SEEDS, NAMES, st.integers(0, 12))
def test_a_ranking_puts_the_words_in_order(seed: int, name: str, count: int) -> None:
    assert numbers.ranking(seed, name, count).tolist() == sorted(range(count), key=lambda i: word(seed, name, i))


@given(SEEDS, NAMES, st.integers(0, 9), st.integers(0, 9))
def test_a_longer_stream_begins_with_the_shorter_one(seed: int, name: str, short: int, more: int) -> None:
    longer = numbers.words(seed, name, short + more)
    assert np.array_equal(longer[:short], numbers.words(seed, name, short))


VECTORS = {
    # (seed, name): first word, then the first three reals in units of 2**-23 and the first six ternaries
    (0, ""): (0xE587D3DFF9E92ED0, [6653907, -5812642, -1426051], [-1, 1, 0, 1, 1, -1]),
    (0, "weight.linear.weight"): (0xBDDDEE4665E8973B, [4054510, -1219300, -8288298], [0, -1, 0, 1, 0, -1]),
    (7, "inputs.3"): (0x45E8E8BDED8E5FFB, [-3807000, -1997326, 4037393], [1, -1, -1, 0, 1, -1]),
    (18446744073709551615, "Ω"): (0x0446209E522DDA0F, [-8108512, -513854, 1571258], [-1, -1, 1, -1, 1, 1]),
}


@pytest.mark.parametrize(("seed", "name"), VECTORS)
def test_known_vectors(seed: int, name: str) -> None:
    """Literals: the numbers are part of the contract and may never change."""
    first, reals, ternaries = VECTORS[seed, name]
    assert int(numbers.words(seed, name, 1)[0]) == first
    assert (numbers.real(seed, name, (3,)) * 2**23).tolist() == reals
    assert numbers.ternary(seed, name, (6,)).tolist() == ternaries


def test_every_value_of_a_small_range_occurs_about_equally_often() -> None:
    """No value of `ternary` is rarer than it should be by more than five standard deviations."""
    counts = np.unique(numbers.ternary(0, "frequencies", (9000,)), return_counts=True)
    assert counts[0].tolist() == [-1, 0, 1]
    assert np.all(np.abs(counts[1] - 3000) < 5 * (9000 * 2 / 9) ** 0.5)
    assert abs(numbers.real(0, "frequencies", (9000,)).mean()) < 5 / (3 * 9000) ** 0.5


def test_streams_with_different_seeds_or_names_differ() -> None:
    streams = {numbers.words(s, n, 2).tobytes() for s in (0, 1, 2) for n in ("", "a", "b", "ab", "weight.a")}
    assert len(streams) == 15
