"""The operations that pipeline ranks ran, against what their schedule prescribes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equivtests.judge.check import Check, Verdict
from equivtests.judge.view import View
from equivtests.reference.schedules import SCHEDULES, placement, prescribed
from equivtests.reference.timeline import Operation, Timeline, problems, timeline_of

Versions = dict[Operation, int]


def schedule(view: View, update: int) -> Iterator[Check]:
    """Every pipeline runs each micro-batch through each stage once, in its schedule's order, with the newest weights."""
    if view.strategy.schedule is None or view.case.asynchronous or view.expectation.steps[update].skipped:
        return
    if not view.observations("timeline", update):
        yield from view.absent("schedule", update, "timeline", "timeline")
        return
    for ranks in view.case.layout.partition("pp"):
        yield judge_pipeline(view, update, ranks)


def pipeline_of(view: View, update: int, ranks: tuple[int, ...]) -> tuple[Timeline, Versions]:
    """What the ranks of one pipeline ran, by their pipeline coordinate. Raises ValueError if it is malformed."""
    shown = {o.rank: o.array for o in view.observations("timeline", update)}
    silent = [rank for rank in ranks if rank not in shown]
    if silent:
        raise ValueError(f"rank {silent[0]} showed no timeline")
    ordered = sorted(ranks, key=lambda rank: view.case.layout.at(rank)["pp"])
    return timeline_of([np.asarray(shown[rank]).reshape(-1, 4).tolist() for rank in ordered])


def judge_pipeline(view: View, update: int, ranks: tuple[int, ...]) -> Check:
    layout, name = view.case.layout, str(view.strategy.schedule)
    where = f"pipeline of ranks {', '.join(map(str, ranks))}"
    try:
        timeline, versions = pipeline_of(view, update, ranks)
    except ValueError as error:
        return view.failed("schedule", update, where, str(error), ranks[0])
    count = max((o.microbatch for operations in timeline for o in operations), default=-1) + 1
    fed = max(len(rank) for rank in view.case.windows[update])
    stages = placement(name, layout.pp, layout.virtual)
    broken = problems(timeline, stages, max(count, fed), SCHEDULES[name].split)
    words = (
        broken[0]
        if broken
        else disorder(timeline, prescribed(name, layout.pp, layout.virtual, count), name)
        or stale(view, update, versions)
    )
    if words:
        return view.failed("schedule", update, where, words, ranks[0])
    return Check("schedule", update, where, Verdict.PASS)


def disorder(ran: Timeline, wanted: Timeline, source: str) -> str:
    """The first operation that is not the one that its source (a schedule) prescribes there, or ""."""
    for rank, (shown, due) in enumerate(zip(ran, wanted, strict=True)):
        for number, (a, b) in enumerate(zip(shown, due, strict=False)):
            if a != b:
                return f"operation {number} of pipeline rank {rank} is the {a}; {source} prescribes the {b}"
        if len(shown) != len(due):
            return f"pipeline rank {rank} ran {len(shown)} operations; {source} prescribes {len(due)}"
    return ""


def stale(view: View, update: int, versions: Versions) -> str:
    """The first operation that did not use the newest weights, or ""."""
    newest = view.expectation.steps[update].steps
    old = next((operation for operation, version in versions.items() if version != newest), None)
    return "" if old is None else f"the {old} used weight version {versions[old]}; the newest is {newest}"
