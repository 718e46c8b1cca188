"""What every data rank was fed, put together from what its ranks showed of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from equivtests.cases.windows import decode_ids
from equivtests.judge.assemble import equal_bits
from equivtests.judge.view import View
from equivtests.record.observation import Observation
from equivtests.reference.rows import rows_of

Key = tuple[int, int]
"""(data rank, micro-batch); what bears no number is counted from -1 downwards."""


@dataclass
class Fed:
    """arrays: inputs of every micro-batch by data rank. problem: why they cannot be told ("" if they can), seen on `rank`."""

    arrays: dict[int, list[np.ndarray]] = field(default_factory=dict)
    problem: str = ""
    rank: int | None = None

    def samples(self, view: View) -> dict[int, Counter[int]]:
        """How often every data rank was fed which sample."""
        decoded = {data: [decode_ids(view.case.model, a).tolist() for a in fed] for data, fed in self.arrays.items()}
        return {data: Counter(i for ids in fed for i in ids) for data, fed in decoded.items()}


def fed(view: View, update: int) -> Fed:
    """What reached the forward passes of an update.

    Ranks that share a data rank are fed the same; those that share a sequence show their positions of it (`Place.box`).
    """
    found = Fed()
    for (data, k), shown in _by_microbatch(view, update).items():
        array, problem, rank = _one(view, shown, None if k < 0 else k)
        if problem:
            return Fed(problem=problem, rank=rank)
        found.arrays.setdefault(data, []).append(array)
    return found


def _by_microbatch(view: View, update: int) -> dict[Key, list[Observation]]:
    layout, groups = view.case.layout, dict[Key, list[Observation]]()
    for position, o in enumerate(view.observations("inputs", update)):
        alone = layout.world == layout.dp or o.microbatch is None  # then every observation is a micro-batch of its own
        k = -1 - position if alone else int(o.microbatch or 0)
        groups.setdefault((layout.data_rank(o.rank), k), []).append(o)
    return groups


def _one(view: View, shown: list[Observation], microbatch: int | None) -> tuple[np.ndarray, str, int]:
    """(inputs, problem, rank) of one micro-batch of one data rank."""
    first = shown[0]
    whole = np.zeros(_shape(first), dtype=first.values().dtype)
    seen = np.zeros(whole.shape, dtype=bool)
    for o in shown:
        if _shape(o) != whole.shape:
            return whole, f"inputs have shape {_shape(o)} here, {whole.shape} on rank {first.rank}", o.rank
        at = tuple(slice(*side) for side in o.place.box or [(0, n) for n in whole.shape])
        values = o.values().reshape(whole[at].shape)
        known = seen[at]
        if not equal_bits(whole[at][known], values[known]):
            return whole, f"ranks {first.rank} and {o.rank} share their data, but were fed different inputs", o.rank
        whole[at], seen[at] = values, True
    if not seen.all():
        return whole, f"{int((~seen).sum())} of {seen.size} input elements reached no rank", first.rank
    wanted = shapes(view, microbatch)
    if whole.shape[1:] in wanted:
        return whole, "", first.rank
    return whole, f"inputs have shape {whole.shape}, but rows of shape {wanted[0]} were to be fed", first.rank


def _shape(o: Observation) -> tuple[int, ...]:
    """Shape of the whole that an array is, or is part of."""
    return o.array.shape if o.place.box is None else o.place.shape


def shapes(view: View, microbatch: int | None) -> list[tuple[int, ...]]:
    """Shapes that the inputs of a sample may have, in the micro-batch of a number or (None) in any."""
    length, *rest = rows_of(view.case, 0).inputs.shape[1:]
    numbers = range(max(1, len(view.case.lengths))) if microbatch is None else (microbatch,)
    own = [length] if view.case.model.own else [view.case.length(k) for k in numbers]
    return [(n, *rest) for n in own]
