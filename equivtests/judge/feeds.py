"""What every data rank was fed, put together from what its ranks showed of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equivtests.cases.case import Case, Model
from equivtests.cases.layout import Layout
from equivtests.cases.windows import decode_ids
from equivtests.judge.assemble import equal_bits
from equivtests.record.observation import Observation
from equivtests.reference.rows import rows_of

Key = tuple[int, int]
"""(data rank, micro-batch); what bears no number is counted from -1 downwards."""


@dataclass
class Fed:
    """arrays: inputs of every micro-batch by data rank. problem: why they cannot be told, or "", as seen on `rank`."""

    arrays: dict[int, list[np.ndarray]] = field(default_factory=dict)
    problem: str = ""
    rank: int | None = None

    def samples(self, model: Model) -> dict[int, Counter[int]]:
        """How often every data rank was fed which sample."""
        decoded = {data: [decode_ids(model, a).tolist() for a in fed] for data, fed in self.arrays.items()}
        return {data: Counter(i for ids in fed for i in ids) for data, fed in decoded.items()}


def fed(case: Case, shown: Sequence[Observation]) -> Fed:
    """What reached the forward passes of an update, from its observations of `inputs`.

    Ranks that share a data rank are fed the same; those that share a sequence show their positions of it (`Place.box`).
    """
    found = Fed()
    for (data, k), parts in _by_microbatch(case.layout, shown).items():
        array, problem, rank = _one(case, parts, None if k < 0 else k)
        if problem:
            return Fed(problem=problem, rank=rank)
        found.arrays.setdefault(data, []).append(array)
    return found


def _by_microbatch(layout: Layout, shown: Sequence[Observation]) -> dict[Key, list[Observation]]:
    groups: dict[Key, list[Observation]] = {}
    for position, o in enumerate(shown):
        alone = layout.world == layout.dp or o.microbatch is None  # then every observation is a micro-batch of its own
        k = -1 - position if alone else int(o.microbatch or 0)
        groups.setdefault((layout.data_rank(o.rank), k), []).append(o)
    return groups


def _one(case: Case, shown: list[Observation], microbatch: int | None) -> tuple[np.ndarray, str, int]:
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
    wanted = sample_shapes(case, microbatch)
    if whole.shape[1:] in wanted:
        return whole, "", first.rank
    return whole, f"inputs have shape {whole.shape}, but rows of shape {wanted[0]} were to be fed", first.rank


def _shape(o: Observation) -> tuple[int, ...]:
    """Shape of the whole that an array is, or is part of."""
    return o.array.shape if o.place.box is None else o.place.shape


def sample_shapes(case: Case, microbatch: int | None) -> list[tuple[int, ...]]:
    """Shapes that the inputs of a sample may have, in the micro-batch of a number or (None) in any."""
    length, *rest = rows_of(case, 0).inputs.shape[1:]
    numbers = range(max(1, len(case.lengths))) if microbatch is None else (microbatch,)
    own = [length] if case.model.own else [case.length(k) for k in numbers]
    return [(n, *rest) for n in own]
