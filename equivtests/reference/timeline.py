"""The order in which pipeline ranks run their operations: what every order must obey, how long it takes, what it keeps.

An order is plain data, whether a schedule prescribes it (`reference.schedules`) or ranks have shown it. Nothing here
assumes a schedule, a placement, or that all operations use the same weights.

Dependencies are those of backpropagation through a chain of stages. F(s, m) needs F(s-1, m). A backward of (s, m) needs
F(s, m) and, but at the last stage, the backward for inputs of (s+1, m). W(s, m) needs I(s, m). I and W are the two
halves of B: Qi, Wan, Huang and Lin, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import SupportsIndex

KIND_CODES = {"F": 0, "B": 1, "I": 2, "W": 3}
"""Kinds of operations, with their codes in observed arrays: forward; full backward; backward for inputs; for weights."""
KIND_WORDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
ROW = ("kind code", "stage", "micro-batch", "weight version")


@dataclass(frozen=True, order=True)
class Operation:
    """One pass of one micro-batch through one stage. Stages count over the whole model, micro-batches from 0."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{KIND_WORDS.get(self.kind, self.kind)} of micro-batch {self.microbatch} on stage {self.stage}"


Timeline = tuple[tuple[Operation, ...], ...]
"""By pipeline rank: its operations, in the order in which it runs them."""


def timeline_of(rows: Sequence[Sequence[Sequence[SupportsIndex]]]) -> tuple[Timeline, dict[Operation, int]]:
    """The timeline, and the weight version that each operation used, from what the ranks have shown.

    rows: by rank an integer array (n, 4) with the columns of `ROW`, in the order in which the rank ran. Of an operation
    that is there twice, the first version counts; `problems` names it. Raises ValueError for a row that is not well
    formed, naming rank and row.
    """
    versions: dict[Operation, int] = {}
    timeline = []
    for rank, array in enumerate(rows):
        shown = [_operation(row, f"rank {rank}, row {n}") for n, row in enumerate(array)]
        timeline.append(tuple(operation for operation, _ in shown))
        for operation, version in shown:
            versions.setdefault(operation, version)
    return tuple(timeline), versions


def _operation(row: Sequence[SupportsIndex], where: str) -> tuple[Operation, int]:
    try:
        numbers = [operator.index(value) for value in row]
    except TypeError as error:
        raise ValueError(f"{where}: {row!r} must be integers: {', '.join(ROW)}") from error
    if len(numbers) != len(ROW):
        raise ValueError(f"{where}: {len(numbers)} columns; needed are {', '.join(ROW)}")
    code, stage, microbatch, version = numbers
    for name, value in zip(ROW, numbers, strict=True):
        if value < 0:
            raise ValueError(f"{where}: {name} is {value}; it must not be negative")
    if code >= len(KIND_CODES):
        known = ", ".join(f"{number} {KIND_WORDS[kind]}" for kind, number in KIND_CODES.items())
        raise ValueError(f"{where}: kind code is {code}; known are {known}")
    return Operation(tuple(KIND_CODES)[code], stage, microbatch), version


# ------------------------------------------------------------------------------------------------- rules


def problems(timeline: Timeline, placement: Sequence[int], microbatches: int, split: bool) -> list[str]:
    """Every rule that a timeline breaks, in words; empty if it trains each micro-batch once and can be executed.

    placement: the rank of each stage. split: whether a backward may be split into I and W (it may still be one B).
    The last rule, that the ranks do not wait for each other for ever, is tried only if all others hold.
    """
    ranks = max(placement) + 1
    if len(timeline) != ranks:
        return [f"the stages lie on {ranks} ranks, but {len(timeline)} ranks have run operations"]
    found: list[str] = []
    for rank, operations in enumerate(timeline):
        found += _strangers(rank, operations, placement, microbatches, split)
        found += _disorder(rank, operations)
    found += _miscounts(timeline, placement, microbatches)
    return found or _deadlock(timeline)


def _strangers(
    rank: int, operations: Sequence[Operation], placement: Sequence[int], microbatches: int, split: bool
) -> Iterator[str]:
    """Operations that this rank must not run at all."""
    kinds = tuple(KIND_CODES) if split else ("F", "B")
    for operation in operations:
        where = f"rank {rank}: {operation}"
        if operation.kind not in kinds:
            yield f"{where}: kind {operation.kind} is none of {', '.join(kinds)}, which this schedule has"
        elif not 0 <= operation.stage < len(placement):
            yield f"{where}: the stages are 0 to {len(placement) - 1}"
        elif not 0 <= operation.microbatch < microbatches:
            yield f"{where}: the micro-batches are 0 to {microbatches - 1}"
        elif placement[operation.stage] != rank:
            yield f"{where}: this stage lies on rank {placement[operation.stage]}"


def _disorder(rank: int, operations: Sequence[Operation]) -> Iterator[str]:
    """Backward before forward, weights before inputs, on the rank that runs both."""
    first = {operation: n for n, operation in reversed(list(enumerate(operations)))}
    for earlier, laters in (("F", "BIW"), ("I", "W")):
        for operation in first:
            before = Operation(earlier, operation.stage, operation.microbatch)
            if operation.kind in laters and first.get(before, -1) > first[operation]:
                yield f"rank {rank}: {operation} ran before its {KIND_WORDS[earlier]}"


def _miscounts(timeline: Timeline, placement: Sequence[int], microbatches: int) -> Iterator[str]:
    """Operations that ran too often or never, over all ranks."""
    times = Counter(operation for operations in timeline for operation in operations)
    for stage, rank in enumerate(placement):
        for microbatch in range(microbatches):
            ran = {kind: times[Operation(kind, stage, microbatch)] for kind in KIND_CODES}
            for wrong in _wrong_counts(ran):
                yield f"rank {rank}: micro-batch {microbatch} on stage {stage}: {wrong}"


def _wrong_counts(ran: Mapping[str, int]) -> Iterator[str]:
    """ran: how often each kind ran for one stage and micro-batch."""
    yield from (f"{KIND_WORDS[kind]} ran {n} times" for kind, n in ran.items() if n > 1)
    if not ran["F"]:
        yield "forward never ran"
    if not (ran["B"] or ran["I"] or ran["W"]):
        yield "backward never ran"
    elif ran["B"] and (ran["I"] or ran["W"]):
        yield "both a full backward and a part of one ran"
    elif not ran["B"]:
        yield from (f"{KIND_WORDS[kind]} never ran" for kind in "IW" if not ran[kind])


# --------------------------------------------------------------------------------------------- execution


@dataclass(frozen=True)
class Costs:
    """Time of an operation by kind. stages: a factor for each stage; none: all stages cost the same.

    Raises ValueError unless all are positive.
    """

    F: int | Fraction = 1
    B: int | Fraction = 2
    I: int | Fraction = 1  # noqa: E741
    W: int | Fraction = 1
    stages: tuple[int | Fraction, ...] = ()

    def __post_init__(self) -> None:
        if min(self.F, self.B, self.I, self.W, *self.stages) <= 0:
            raise ValueError(f"costs must be positive, got {self}")

    def of(self, operation: Operation) -> Fraction:
        factor = self.stages[operation.stage] if self.stages else 1
        return Fraction(getattr(self, operation.kind)) * factor


EQUAL = Costs()
"""Every half of a backward costs what a forward does."""


def _needs(operation: Operation, last: int) -> list[tuple[str, int, int]]:
    """What must have ended before: (kinds of which one suffices, stage, micro-batch). last: the last stage."""
    stage, microbatch = operation.stage, operation.microbatch
    if operation.kind == "W":
        return [("I", stage, microbatch)]
    if operation.kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    return [("F", stage, microbatch), *([("BI", stage + 1, microbatch)] if stage < last else [])]


def _met(need: tuple[str, int, int], done: Mapping[Operation, Fraction]) -> Operation | None:
    """The operation that has met a need."""
    kinds, stage, microbatch = need
    return next((o for o in (Operation(k, stage, microbatch) for k in kinds) if o in done), None)


def _start(operation: Operation, last: int, ends: Mapping[Operation, Fraction]) -> Fraction | None:
    """When all that an operation needs has ended; None if something has not run yet."""
    met = [_met(need, ends) for need in _needs(operation, last)]
    return max((ends[o] for o in met if o), default=Fraction(0)) if all(met) else None


def _execute(timeline: Timeline, costs: Costs) -> tuple[dict[Operation, Fraction], list[tuple[int, Operation]]]:
    """Ends of all operations that can run, and by rank the one that waits for ever. Every rank runs in its order."""
    last = _last_stage(timeline)
    ends: dict[Operation, Fraction] = {}
    free, position = [Fraction(0)] * len(timeline), [0] * len(timeline)
    moved = True
    while moved:
        moved = False
        for rank, operations in enumerate(timeline):
            for operation in operations[position[rank] :]:
                start = _start(operation, last, ends)
                if start is None:
                    break
                free[rank] = ends[operation] = max(start, free[rank]) + costs.of(operation)
                position[rank] += 1
                moved = True
    stuck = [(rank, ops[n]) for rank, (ops, n) in enumerate(zip(timeline, position, strict=True)) if n < len(ops)]
    return ends, stuck


def _last_stage(timeline: Timeline) -> int:
    return max((operation.stage for operations in timeline for operation in operations), default=0)


def _deadlock(timeline: Timeline) -> list[str]:
    """By rank that cannot go on: where it waits, and for what."""
    ends, stuck = _execute(timeline, EQUAL)
    found = []
    for rank, operation in stuck:
        missing = [need for need in _needs(operation, _last_stage(timeline)) if _met(need, ends) is None]
        words = [f"the {KIND_WORDS[kinds[0]]} of micro-batch {m} on stage {stage}" for kinds, stage, m in missing]
        found.append(f"rank {rank}: {operation} waits for ever for {' and '.join(words)}")
    return found


@dataclass(frozen=True)
class Timed:
    """A timeline with the time in which every operation starts and ends. busy: time that each rank computes."""

    timeline: Timeline
    starts: Mapping[Operation, Fraction]
    ends: Mapping[Operation, Fraction]
    busy: tuple[Fraction, ...]

    @property
    def makespan(self) -> Fraction:
        """From the start of the first operation to the end of the last."""
        return max(self.ends.values(), default=Fraction(0))

    @property
    def idle_by_rank(self) -> tuple[Fraction, ...]:
        """The part of the makespan in which each rank does not compute."""
        return tuple(1 - busy / self.makespan for busy in self.busy)

    @property
    def idle(self) -> Fraction:
        """The idle fraction (bubble) of all ranks together: 1 - busy / (P · makespan)."""
        return sum(self.idle_by_rank, start=Fraction(0)) / len(self.timeline)


def simulate(timeline: Timeline, costs: Costs = EQUAL) -> Timed:
    """When every operation runs at the earliest: communication is free, a rank runs one operation at a time.

    Raises ValueError for a timeline that is empty, runs an operation twice, or cannot be executed, and for costs of
    fewer stages than it has.
    """
    operations = [operation for rank in timeline for operation in rank]
    if not operations or len(set(operations)) < len(operations):
        raise ValueError("a timeline to simulate has operations, and none twice")
    if costs.stages and len(costs.stages) <= _last_stage(timeline):
        raise ValueError(f"costs of {len(costs.stages)} stages, but stage {_last_stage(timeline)} runs")
    ends, stuck = _execute(timeline, costs)
    if stuck:
        raise ValueError("this timeline cannot be executed: " + "; ".join(_deadlock(timeline)))
    starts = {operation: end - costs.of(operation) for operation, end in ends.items()}
    busy = tuple(sum((costs.of(o) for o in rank), start=Fraction(0)) for rank in timeline)
    return Timed(timeline, starts, ends, busy)


# -------------------------------------------------------------------------------------------- activations


def peak_live(timeline: Timeline) -> tuple[int, ...]:
    """By rank: the most activations (of one micro-batch in one stage) that are alive at once.

    F makes one. B frees it; of a split backward W does, the last that needs the inputs of the stage. What I could free
    already is not counted apart.
    """
    return tuple(_peak(operations) for operations in timeline)


def peak_live_by_stage(timeline: Timeline) -> tuple[int, ...]:
    """By stage: the same. The peaks of the stages of one rank need not fall together."""
    stages: dict[int, list[Operation]] = {}
    for operation in (operation for operations in timeline for operation in operations):
        stages.setdefault(operation.stage, []).append(operation)
    return tuple(_peak(stages.get(stage, [])) for stage in range(max(stages, default=-1) + 1))


def _peak(operations: Sequence[Operation]) -> int:
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(accumulate((change[operation.kind] for operation in operations), initial=0))
