"""Pipelines that are never flushed: the order of the whole run, the version of every pass, the versions that are kept.

Micro-batches are numbered through the run: those of the first window, then those of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from equivtests.cases.case import Case
from equivtests.cases.layout import Group
from equivtests.judge.check import Check, Verdict
from equivtests.judge.schedule import Versions, disorder
from equivtests.judge.view import View
from equivtests.reference.schedules import prescribed
from equivtests.reference.timeline import ROW, Operation, Timeline, timeline_of
from equivtests.reference.versions import Used, live_versions, used

Checks = Iterator[Check]


def first_microbatches(case: Case) -> list[int]:
    """The number of the first micro-batch of every window, and of the one after the last.

    A window without a valid token has none: it makes no update, and nothing of it passes.
    """
    counts = (max(map(len, window)) if case.tokens(update) else 0 for update, window in enumerate(case.windows))
    return [0, *accumulate(counts)]


def expected_orders(view: View) -> Timeline:
    """By stage, what a run has to do in what order: without flush, but for the windows before which it drains.

    Of a restored run that did not drain, what is left after the last backward pass before the save.
    """
    case, start = view.case, view.record.start
    first = first_microbatches(case)
    drains = [d for d in view.expectation.semantics.staleness.drains if 0 < d < case.updates]
    orders: list[list[Operation]] = [[] for _ in range(case.layout.pp)]
    for begin, end in pairwise([0, *drains, case.updates]):
        count = first[end] - first[begin]
        for order, part in zip(orders, prescribed(str(view.strategy.schedule), case.layout.pp, 1, count), strict=True):
            order += [Operation(o.kind, o.stage, o.microbatch + first[begin]) for o in part]
    return tuple(tuple(left_after(order, first[start], start in drains)) for order in orders)


def left_after(order: list[Operation], count: int, drained: bool) -> list[Operation]:
    """The operations after the backward passes of the first `count` micro-batches; after a drain, of later ones only."""
    if drained:
        return [o for o in order if o.microbatch >= count]
    ended = max((n for n, o in enumerate(order) if o.kind == "B" and o.microbatch < count), default=-1)
    return order[ended + 1 :]


def pipelines(view: View) -> tuple[Group, ...]:
    """The pipelines of an asynchronous run that shows what it does, else none."""
    shows = view.strategy.schedule is not None and view.case.asynchronous == "pipeline"
    return view.case.layout.partition("pp") if shows and "timeline" in view.strategy.observes else ()


def run_of(view: View, ranks: Group) -> tuple[Timeline, Versions]:
    """What the stages of one pipeline ran, from the first update to the last. Raises ValueError if it is malformed."""
    key = f"run.{ranks}"
    if key not in view.cache:
        rows = [rows_of_rank(view, rank) for rank in sorted(ranks, key=lambda rank: view.case.layout.at(rank)["pp"])]
        view.cache[key] = timeline_of(rows)
    found: tuple[Timeline, Versions] = view.cache[key]
    return found


def rows_of_rank(view: View, rank: int) -> list[list[int]]:
    shown = [o for update in view.updates for o in view.observations("timeline", update) if o.rank == rank]
    if not shown:
        raise ValueError(f"rank {rank} showed no timeline")
    odd = next((o for o in shown if o.array.ndim != 2 and o.array.size), None)
    if odd is not None:
        words = f"a timeline of shape {odd.array.shape}; it is (n, {len(ROW)}): {', '.join(ROW)}"
        raise ValueError(f"rank {rank} showed at update {odd.update} {words}")
    return [row for o in shown for row in o.array.tolist()]


def observed_versions(view: View, ranks: Group) -> dict[tuple[int, int], tuple[int, int]]:
    """By (stage, window): the versions that its first micro-batch used in the forward and in the backward pass."""
    first, shown = first_microbatches(view.case), run_of(view, ranks)[1]
    found = {}
    for stage in range(view.case.layout.pp):
        for window, (number, next_window) in enumerate(pairwise(first)):
            passes = [shown.get(Operation(kind, stage, number)) for kind in "FB"]
            if None not in passes and number < next_window:
                found[stage, window] = (int(passes[0] or 0), int(passes[1] or 0))
    return found


def where(ranks: Group) -> str:
    return f"pipeline of ranks {', '.join(map(str, ranks))}"


def stream(view: View, update: int) -> Checks:
    """The stages run all micro-batches of the run in the order of the schedule, without flush. Judged once."""
    if update != view.updates.start:
        return
    for ranks in pipelines(view):
        try:
            words = disorder(run_of(view, ranks)[0], expected_orders(view), f"{view.strategy.schedule} without flush")
        except ValueError as error:
            words = str(error)
        if words:
            yield view.failed("schedule", update, where(ranks), words, ranks[0])
        else:
            yield Check("schedule", update, where(ranks), Verdict.PASS)


def versions(view: View, update: int) -> Checks:
    """Every pass of the window used the version of the weights that the declared scheme says."""
    if view.expectation.steps[update].skipped:
        return
    for ranks in pipelines(view):
        try:
            shown = run_of(view, ranks)[1]
        except ValueError:
            return  # as a fault of the schedule
        words = next(wrong_versions(view, update, shown), "")
        verdict = Verdict.FAIL if words else Verdict.PASS
        yield Check("versions", update, where(ranks), verdict, np.inf if words else 0.0, detail=words)


def wrong_versions(view: View, update: int, shown: Versions) -> Iterator[str]:
    """In words, every pass of a window that did not use the version that its stage has to use."""
    first = first_microbatches(view.case)
    table = used(view.case, view.expectation.semantics.staleness, update)
    for operation, version in shown.items():
        ours = operation.stage < len(table)  # others are a fault of the schedule
        if ours and first[update] <= operation.microbatch < first[update + 1]:
            wanted = version_of(table, operation)
            if version != wanted:
                scheme = view.expectation.semantics.staleness.versions
                yield f"stage {operation.stage}: the {operation} used weight version {version}; {scheme} says {wanted}"


def version_of(table: tuple[Used, ...], operation: Operation) -> int:
    row = table[operation.stage]
    return row.forward if operation.kind == "F" else row.backward


def live(view: View) -> Checks:
    """Every stage keeps just as many versions as the scheme needs, at most, over the whole run."""
    if view.record.start:
        return
    for ranks in pipelines(view):
        kept = {
            rank: max(
                (int(o.array.item()) for u in view.updates for o in view.observations("live", u) if o.rank == rank),
                default=None,
            )
            for rank in ranks
        }
        for rank, most in kept.items():
            stage = view.case.layout.at(rank)["pp"]
            name = f"stage {stage}"
            wanted = most_live(view, rank, stage)
            if most is None:
                yield from view.absent("live versions", view.case.updates - 1, name, "live")
            elif most != wanted:
                words = f"stage {stage} kept {most} versions of its weights at once; the scheme needs {wanted}"
                yield view.failed("live versions", view.case.updates - 1, name, words, rank)
            else:
                yield Check("live versions", view.case.updates - 1, name, Verdict.PASS)


def most_live(view: View, rank: int, stage: int) -> int:
    """The versions that a stage has to keep at once, by the order of its passes, what each of them uses, and when the
    stage made its updates (where several stages make them together, that is later than its own last backward pass)."""
    case, order = view.case, expected_orders(view)[stage]
    first = first_microbatches(case)
    window = {m: w for w, (a, b) in enumerate(pairwise(first)) for m in range(a, b)}
    table = [used(case, view.expectation.semantics.staleness, w) for w in range(case.updates)]
    needs = {o: version_of(table[window[o.microbatch]], o) for o in order}
    return live_versions(order, needs, made_after(view, rank))


def made_after(view: View, rank: int) -> dict[Operation, int]:
    """The operations of a rank after which it made updates, with the version that it made."""
    made, version, last = dict[Operation, int](), 0, None
    for update in view.updates:
        if view.expectation.steps[update].applies is None:
            continue
        shown = [o for o in view.observations("timeline", update) if o.rank == rank]
        (operations,), _ = timeline_of([[row for o in shown for row in o.array.tolist()]])
        last, version = operations[-1] if operations else last, version + 1
        if last is not None:
            made[last] = version
    return made
