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
    values of one place in one copy are added up (or averaged) first.
    """
    if _equal_copies(parts):
        return Whole(parts[0].values(), copies=len(parts))
    filled = _fill_all(parts, world)
    broken = next((whole for whole in filled if whole.problem), None)
    return broken or _compare_copies(filled, _copies(parts))


def incomplete(parts: list[Observation], world: int) -> str:
    """Why the parts do not make one tensor ("" if they do). Whether copies are equal is another question."""
    return next((whole.problem for whole in _fill_all(parts, world) if whole.problem), "")


def _fill_all(parts: list[Observation], world: int) -> list[Whole]:
    """The tensor of every copy; a single one where the parts cannot be of one tensor."""
    problem = _misfit(parts)
    if problem:
        return [Whole(np.zeros(()), problem, parts[0].rank)]
    return [_fill(members, world) for members in _copies(parts)]


def _copies(parts: list[Observation]) -> list[list[Observation]]:
    """The parts by the copy that they belong to; what all ranks share is one, whatever copies they name."""
    copies: dict[int, list[Observation]] = {}
    for part in parts:
        shared = bool(part.place.partial) and part.place.parts == 0
        copies.setdefault(0 if shared else part.place.replica, []).append(part)
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
    regions = {(p.place.box, p.place.interval) for p in parts if p.place.partial and not p.place.parts}
    if len({(part.place.partial, part.place.parts) for part in parts}) > 1 or len(regions) > 1:
        return "ranks disagree on how their values combine (Place.partial and parts, where a value of all ranks lies)"
    return ""


Part = tuple[Place, np.ndarray, int]
"""A value, where it belongs, and the rank that it comes from."""


def _values(members: list[Observation], world: int) -> tuple[list[Part], Whole | None]:
    """The values of one copy, partial ones combined; or what is missing."""
    if not members[0].place.partial:
        return [(part.place, part.values(), part.rank) for part in members], None
    regions: dict[object, list[Observation]] = {}
    for part in sorted(members, key=lambda part: part.rank):
        regions.setdefault((part.place.box, part.place.interval), []).append(part)
    found: list[Part] = []
    for shared in regions.values():
        problem = _not_once(shared, world)
        if problem:
            return [], Whole(shared[0].values(), problem, shared[0].rank)
        found.append((shared[0].place, _combine(shared), shared[0].rank))
    return found, None


def _not_once(parts: list[Observation], world: int) -> str:
    """Why these are not the parts of one value, each of another rank, or ""."""
    seen, needed = [part.rank for part in parts], parts[0].place.parts or world
    if len(set(seen)) == len(seen) == needed and set(seen) <= set(range(world)):
        return ""
    words = f"all {world} ranks" if needed == world else f"{needed} of the ranks"
    return f"a partial value needs {words} once, but ranks {seen} showed one"


def _combine(parts: list[Observation]) -> np.ndarray:
    shape = parts[0].array.shape
    total = np.sum([part.values().astype(np.float64).reshape(shape) for part in parts], axis=0)
    return np.asarray(total / len(parts) if parts[0].place.partial == "mean" else total)


def _fill(members: list[Observation], world: int) -> Whole:
    parts, broken = _values(members, world)
    if broken is not None:
        return broken
    (first, values, rank), *others = parts
    if not others and first.box is None and first.interval is None:
        return Whole(values.reshape(first.shape))
    whole = np.zeros(first.shape, dtype=values.dtype)
    count = np.zeros(first.shape, dtype=np.int64)
    for place, values, _ in parts:
        region = _region(place)
        whole.reshape(-1)[region.reshape(-1)] = values.reshape(-1)
        count.reshape(-1)[region.reshape(-1)] += 1
    return Whole(whole, "" if (count == 1).all() else _coverage_problem(count, members), rank)


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
