"""From the parts that ranks showed to whole tensors: coverage, replicas, partial sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from equivtests.record.observation import Observation, Place


@dataclass(frozen=True)
class Whole:
    """A whole tensor. `problem`: why the parts do not make one ("" if they do); `rank`: one rank that it concerns."""

    values: np.ndarray
    problem: str = ""
    rank: int | None = None
    copies: int = 1


def assemble(parts: list[Observation], world: int) -> Whole:
    """Put the parts of one tensor together.

    Every copy (replica number) must cover every element exactly once, and all copies must be equal bit for bit. Partial
    values of all ranks are added up (or averaged).
    """
    if _equal_copies(parts):
        return Whole(parts[0].values(), copies=len(parts))
    filled = _fill_all(parts, world)
    broken = next((whole for whole in filled if whole.problem), None)
    if broken or parts[0].place.partial:
        return broken or filled[0]
    return _compare_copies(filled, _copies(parts))


def incomplete(parts: list[Observation], world: int) -> str:
    """Why the parts do not make one tensor ("" if they do). Whether copies are equal is another question."""
    return next((whole.problem for whole in _fill_all(parts, world) if whole.problem), "")


def _fill_all(parts: list[Observation], world: int) -> list[Whole]:
    """The tensor of every copy; a single one where parts are combined, or cannot be of one tensor."""
    problem = _misfit(parts)
    if problem:
        return [Whole(np.zeros(()), problem, parts[0].rank)]
    return [_combine(parts, world)] if parts[0].place.partial else [_fill(members) for members in _copies(parts)]


def _copies(parts: list[Observation]) -> list[list[Observation]]:
    """The parts by the copy that they belong to."""
    copies: dict[int, list[Observation]] = {}
    for part in parts:
        copies.setdefault(part.place.replica, []).append(part)
    return [members for _, members in sorted(copies.items())]


def _equal_copies(parts: list[Observation]) -> bool:
    """The usual case, without detours: every part is a whole copy of its own, and all have the same bytes."""
    first = parts[0]
    if first.place.box is not None or first.place.interval is not None or first.array.shape != first.place.shape:
        return False
    content, seen = first.array.tobytes(), set()
    for part in parts:
        place = part.place
        if place.partial or place.box is not None or place.interval is not None or place.replica in seen:
            return False
        same = (place.shape, part.dtype, part.array.dtype) == (first.place.shape, first.dtype, first.array.dtype)
        if not same or part.array.tobytes() != content:
            return False
        seen.add(place.replica)
    return True


def _misfit(parts: list[Observation]) -> str:
    """Why the parts cannot be of one tensor, or ""."""
    shapes, dtypes = {part.place.shape for part in parts}, {part.dtype for part in parts}
    if len(shapes) > 1:
        return f"ranks name different shapes of the whole: {sorted(shapes)}"
    if len(dtypes) > 1:
        return f"ranks show different dtypes: {', '.join(sorted(dtypes))}"
    combined = {(part.place.partial, part.place.partial and (part.place.box, part.place.interval)) for part in parts}
    if len(combined) > 1:
        return "ranks disagree on how their values combine (Place.partial, and where a partial value lies)"
    return ""


def _combine(parts: list[Observation], world: int) -> Whole:
    parts = sorted(parts, key=lambda part: part.rank)
    seen = [part.rank for part in parts]
    if seen != list(range(world)):
        problem = f"a partial value needs all {world} ranks once, but ranks {seen} showed one"
        return Whole(parts[0].values(), problem, seen[0])
    shape = parts[0].array.shape
    total = np.sum([part.values().astype(np.float64).reshape(shape) for part in parts], axis=0)
    return Whole(total / world if parts[0].place.partial == "mean" else total)


def _fill(members: list[Observation]) -> Whole:
    first = members[0]
    if len(members) == 1 and first.place.box is None and first.place.interval is None:
        return Whole(first.values().reshape(first.place.shape))
    values = np.zeros(first.place.shape, dtype=first.values().dtype)
    count = np.zeros(first.place.shape, dtype=np.int64)
    for part in members:
        region = _region(part.place)
        values.reshape(-1)[region.reshape(-1)] = part.values().reshape(-1)
        count.reshape(-1)[region.reshape(-1)] += 1
    if (count == 1).all():
        return Whole(values)
    return Whole(values, _coverage_problem(count, members), first.rank)


def _region(place: Place) -> np.ndarray:
    """Flat indices of a place's elements, in the order of its array."""
    index = np.arange(math.prod(place.shape)).reshape(place.shape)
    if place.interval is not None:
        return index.reshape(-1)[slice(*place.interval)]
    if place.box is not None:
        return index[tuple(slice(*side) for side in place.box)]
    return index


def _coverage_problem(count: np.ndarray, members: list[Observation]) -> str:
    missing, twice = int((count == 0).sum()), int((count > 1).sum())
    ranks = sorted({part.rank for part in members})
    words = [f"{missing} of {count.size} elements shown by no rank"] if missing else []
    words += [f"{twice} elements shown more than once"] if twice else []
    return f"{' and '.join(words)} (copy {members[0].place.replica}, ranks {ranks})"


def _compare_copies(filled: list[Whole], members: list[list[Observation]]) -> Whole:
    first = filled[0].values
    for whole, parts in zip(filled[1:], members[1:], strict=True):
        if not equal_bits(whole.values, first):
            return Whole(first, _disagreement(filled, members), parts[0].rank, len(filled))
    return Whole(first, copies=len(filled))


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equality of values, NaN equal to NaN; shapes and dtypes must agree."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.tobytes() == b.tobytes() or bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def _disagreement(filled: list[Whole], members: list[list[Observation]]) -> str:
    stacked = np.stack([whole.values.astype(np.float64).reshape(-1) for whole in filled])
    at = int(np.argmax(np.ptp(stacked, axis=0)))
    shown = ", ".join(f"rank {m[0].rank}: {v:.9g}" for m, v in zip(members, stacked[:, at], strict=True))
    return f"ranks disagree, most at element {at}: {shown}"
