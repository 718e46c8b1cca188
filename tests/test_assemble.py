"""Whole tensors from parts: what covers each element once and agrees on all copies; the rest is named."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from synthetic import cut_place

from equivtests.judge.assemble import assemble, equal_bits, incomplete
from equivtests.record.observation import Observation, Place, Recorder

DTYPES = ("float32", "float64", "int64")


def part(rank: int, where: Place, array: Any, dtype: str = "float32") -> Observation:
    return Observation("weight", "w", rank, 0, None, where, dtype, np.asarray(array, dtype=np.dtype(dtype)))


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.sampled_from(((1,), (5,), (3, 4), (2, 3, 2))))
    return np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(draw(st.sampled_from(DTYPES)))


@st.composite
def sharded(draw: st.DrawFn) -> tuple[np.ndarray, list[Observation]]:
    """A tensor, and its parts on up to four ranks in up to two copies."""
    whole, cut = draw(tensors()), draw(st.sampled_from(("flat", "box")))
    shards, copies = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    parts = []
    for rank in range(shards * copies):
        where = cut_place(whole.shape, cut, shards, rank % shards, rank // shards)
        array = whole.reshape(-1)[slice(*where.interval)] if where.interval else whole[slice(*where.box[0])]
        parts.append(part(rank, where, array, str(whole.dtype)))
    return whole, parts


@given(sharded(), st.randoms())
def test_parts_in_any_order_make_the_whole(case: tuple[np.ndarray, list[Observation]], rng: random.Random) -> None:
    whole, parts = case
    rng.shuffle(parts)
    found = assemble(parts, len(parts))
    assert found.problem == "" and equal_bits(found.values, whole)


@given(sharded())
def test_parts_are_complete_whatever_their_values(case: tuple[np.ndarray, list[Observation]]) -> None:
    """Copies that differ are complete: what they hold is not a question of form."""
    _, parts = case
    assert incomplete([dataclasses.replace(p, array=p.array + p.rank) for p in parts], len(parts)) == ""
    lost = max(parts, key=lambda p: p.array.size)
    left = [p for p in parts if p is not lost]
    assert not left or incomplete(left, len(parts)) == assemble(left, len(parts)).problem


@pytest.mark.parametrize(("partial", "wanted"), [("sum", 3.0), ("mean", 1.5)])
def test_shares_combine_whatever_copy_they_name_and_however_they_are_shaped(partial: Any, wanted: float) -> None:
    shares = [part(0, Place((), partial=partial), 1.0), part(1, Place((), partial=partial, replica=1), [2.0])]
    found = assemble(shares, 2)
    assert found.problem == incomplete(shares, 2) == "" and found.values == wanted


@given(sharded(), st.data())
def test_a_missing_part_is_named(case: tuple[np.ndarray, list[Observation]], data: st.DataObject) -> None:
    _, parts = case
    lost = data.draw(st.sampled_from([p for p in parts if p.array.size]))
    left = [p for p in parts if p is not lost]
    assume(any(p.place.replica == lost.place.replica for p in left))
    problem = assemble(left, len(parts)).problem
    assert f"{lost.array.size} of {np.prod(lost.place.shape)} elements shown by no rank" in problem
    assert f"copy {lost.place.replica}" in problem


@given(sharded(), st.data())
def test_a_part_shown_twice_is_named(case: tuple[np.ndarray, list[Observation]], data: st.DataObject) -> None:
    """Even if both say the same: in a sum or a norm it would count twice."""
    _, parts = case
    twice = data.draw(st.sampled_from([p for p in parts if p.array.size]))
    found = assemble([*parts, dataclasses.replace(twice, rank=7)], len(parts))
    assert f"{twice.array.size} elements shown more than once" in found.problem and "7" in found.problem


def test_a_gap_and_an_overlap_of_the_same_size_do_not_cancel() -> None:
    parts = [part(r, Place((6,), interval=span), np.ones(3)) for r, span in enumerate([(0, 3), (2, 5)])]
    assert assemble(parts, 2).problem.startswith("1 of 6 elements shown by no rank and 1 elements shown more than once")


@given(sharded(), st.data())
def test_copies_that_differ_in_one_bit_are_named(
    case: tuple[np.ndarray, list[Observation]], data: st.DataObject
) -> None:
    whole, parts = case
    assume(whole.dtype.kind == "f" and max(p.place.replica for p in parts) == 1)
    i = data.draw(st.sampled_from([i for i, p in enumerate(parts) if p.place.replica == 1 and p.array.size]))
    array = parts[i].array.copy()
    array.reshape(-1)[0] = np.nextafter(array.reshape(-1)[0], array.dtype.type(np.inf))
    parts[i] = dataclasses.replace(parts[i], array=array)
    found = assemble(parts, len(parts))
    assert found.problem.startswith("ranks disagree, most at element") and found.rank is not None


def test_the_copies_are_quoted_with_their_ranks() -> None:
    found = assemble([part(r, Place((2,), replica=r), [1, 2 + (r == 2)]) for r in range(4)], 4)
    assert found.problem == "ranks disagree, most at element 1: rank 0: 2, rank 1: 2, rank 2: 3, rank 3: 2"
    assert (found.rank, found.copies, found.values.tolist()) == (2, 4, [1, 2])


def test_copies_that_are_all_nan_agree() -> None:
    parts = [part(r, Place((), replica=r), np.nan) for r in range(2)]
    assert assemble(parts, 2).problem == ""


def test_copies_of_different_dtypes_disagree() -> None:
    parts = [part(r, Place((), replica=r), 1.0, dtype) for r, dtype in enumerate(("float32", "float64"))]
    assert "dtype" in assemble(parts, 2).problem


def test_parts_of_different_dtypes_do_not_make_a_whole() -> None:
    """A float64 part written into a float32 whole would be rounded unseen."""
    parts = [
        part(r, Place((2,), interval=(r, r + 1)), [1 + 1e-12], dtype) for r, dtype in enumerate(("float32", "float64"))
    ]
    assert "dtype" in assemble(parts, 2).problem


def test_different_shapes_of_the_whole_are_named() -> None:
    parts = [part(0, Place((2,)), [1, 2]), part(1, Place((1, 2), replica=1), [[1, 2]])]
    assert assemble(parts, 2).problem == "ranks name different shapes of the whole: [(1, 2), (2,)]"


@pytest.mark.parametrize(("how", "expected"), [("sum", [6.0, 12.0]), ("mean", [2.0, 4.0])])
def test_partial_values_are_added_up_or_averaged(how: Any, expected: list[float]) -> None:
    parts = [part(r, Place((2,), partial=how), [r + 1, 2 * (r + 1)]) for r in range(3)]
    found = assemble(parts, 3)
    assert found.problem == "" and found.values.tolist() == expected and found.values.dtype == np.float64


def test_partial_values_are_added_in_the_order_of_ranks() -> None:
    """2^53 + 1 + 1 depends on the order of its terms; a verdict must not depend on who reported first."""
    parts = [part(r, Place((), partial="sum"), x, "float64") for r, x in enumerate((2.0**53, 1.0, 1.0, -(2.0**53)))]
    sums = {float(assemble(order, 4).values) for order in (parts, parts[::-1], [*parts[2:], *parts[:2]])}
    assert len(sums) == 1


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 1], [0, 5]])
def test_a_partial_value_needs_every_rank_once(ranks: list[int]) -> None:
    """Two values of rank 0 are not one of each rank."""
    problem = assemble([part(r, Place((), partial="sum"), 1.0) for r in ranks], 2).problem
    assert problem.startswith("a partial value needs all 2 ranks")
    assert str(sorted(ranks)) in problem


@pytest.mark.parametrize(
    "other", [Place((2,)), Place((2,), partial="mean"), Place((2,), interval=(0, 1), partial="sum")]
)
def test_values_that_combine_in_different_ways_do_not_mix(other: Place) -> None:
    parts = [part(0, Place((2,), partial="sum"), [1.0, 2.0]), part(1, other, [1.0, 2.0][: other.size])]
    for order in (parts, parts[::-1]):
        assert assemble(order, 2).problem.startswith("ranks disagree on how their values combine")


@given(sharded())
def test_assembling_changes_nothing(case: tuple[np.ndarray, list[Observation]]) -> None:
    _, parts = case
    before = [p.array.copy() for p in parts]
    assemble(parts, len(parts)).values.reshape(-1)[...] = 0
    if len(parts) > 1:
        assert all(np.array_equal(p.array, b) for p, b in zip(parts, before, strict=True))


def test_bfloat16_is_widened_exactly() -> None:
    bits = np.array([0x3F80, 0xC000, 0x0001, 0x7F80], dtype=np.uint16)
    found = assemble([Observation("weight", "w", 0, 0, None, Place((4,)), "bfloat16", bits)], 1)
    assert found.values.dtype == np.float32
    assert found.values.tolist() == [1.0, -2.0, 2.0**-133, np.inf]


# ---------------------------------------------------------------------------------------------- recording


def test_a_recorder_copies_what_it_is_given() -> None:
    recorder, array = Recorder(2), np.ones(3)
    recorder("weight", "w", array, update=0)
    array[:] = 7
    (shown,) = recorder.observations
    assert shown.array.tolist() == [1, 1, 1] and (shown.rank, shown.dtype, shown.place) == (2, "float64", Place((3,)))


def test_a_recorder_refuses_what_it_cannot_place() -> None:
    recorder = Recorder(0)
    with pytest.raises(ValueError, match=r"observe\('wieght', …\): unknown kind; known are inputs, tokens"):
        recorder("wieght", "w", np.ones(3), update=0)
    with pytest.raises(ValueError, match="array of 3 elements at a place of 4 elements"):
        recorder("weight", "w", np.ones(3), update=0, place=Place((4, 4), box=((0, 2), (1, 3))))
    with pytest.raises(ValueError, match=r"interval \(2, 5\) does not lie in the shape \(2, 2\)"):
        recorder("weight", "w", np.ones(3), update=0, place=Place((2, 2), interval=(2, 5)))
    assert recorder.observations == []


@pytest.mark.parametrize(
    ("where", "size"),
    [
        (Place((3, 4)), 12),
        (Place(()), 1),
        (Place((3, 4), box=((1, 3), (0, 4))), 8),
        (Place((3, 4), box=((3, 3), (0, 4))), 0),
        (Place((3, 4), interval=(5, 7)), 2),
    ],
)
def test_sizes_of_places(where: Place, size: int) -> None:
    assert where.size == size
