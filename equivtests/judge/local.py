"""Local SGD: every worker is judged as one device that trains alone, and the average of their weights beside it.

A worker steps on its own rows, by its own tokens, with its own optimizer state and counters. After every `period` windows,
counted whether or not a step was made in them, its weights are the mean of all workers' stepped weights, bit for bit the
same on all (Stich 2019, Local SGD converges fast and communicates little, algorithm 1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from equivtests.judge import checks
from equivtests.judge.assemble import equal_bits
from equivtests.judge.check import Check, Verdict
from equivtests.judge.checks import PER_UPDATE, applied_once
from equivtests.judge.tolerance import Distance, elementwise
from equivtests.judge.view import View
from equivtests.reference import local
from equivtests.reference.forward import Weights

Checks = Iterator[Check]


@dataclass
class Worker(View):
    """What one worker showed, beside what it has to show alone. everyone: the workers' views, by rank, its own too."""

    everyone: list[Worker] = field(default_factory=list)

    @property
    def rank(self) -> int:
        assert self.case.worker is not None
        return self.case.worker


def views_of(view: View) -> list[View]:
    """The views that are judged: one of each worker that steps alone, or just this one."""
    return [*workers_of(view)] if view.expectation.workers else [view]


def workers_of(view: View) -> list[Worker]:
    """A view of every worker's observations, by rank. They are made once."""
    if "workers" not in view.cache:
        everyone: list[Worker] = []
        everyone += [worker_of(view, rank, everyone) for rank in range(len(view.expectation.workers))]
        view.cache["workers"] = everyone
    found: list[Worker] = view.cache["workers"]
    return found


def worker_of(view: View, rank: int, everyone: list[Worker]) -> Worker:
    expectation = view.expectation.workers[rank]
    record = replace(view.record, observations=[o for o in view.record.observations if o.rank == rank])
    earlier = None if view.earlier is None else workers_of(view.earlier)[rank]
    entering = {} if earlier is None else applied_once(earlier, record.start - 1)[1]
    return Worker(
        expectation.case, view.strategy, record, expectation, view.threshold, entering, earlier, everyone=everyone
    )


def averages(view: View, update: int) -> bool:
    """Whether this is a worker's view, and the weights that leave the update are an average."""
    return isinstance(view, Worker) and local.averaged_after(view.expectation.semantics, update)


def stepped(view: Worker, update: int) -> Weights:
    """A worker's weights after its own step of an update, before any averaging, as follows from what it showed."""
    return applied_once(view, update)[0]


def weight_update(view: View, update: int) -> Checks:
    """The step that the worker makes of what it showed; where an average is due, the mean of all workers' steps."""
    if not isinstance(view, Worker) or not averages(view, update):
        yield from checks.weight_update(view, update)
        return
    try:
        steps = [stepped(worker, update) for worker in view.everyone]
    except checks.NO_STEP as error:
        words = f"no worker's step can be made from what was shown: {error}"
        yield view.failed("weight update", update, "all", words.splitlines()[0])
        return
    for name in view.expectation.weights[0]:
        after = view.whole("weight", name, update + 1)
        copies = [worker[name].double().numpy() for worker in steps if name in worker]
        if after is None or len(copies) < len(steps):
            yield from view.absent("weight update", update, name, "weight")
        elif after.problem:
            yield view.failed("weight update", update, name, after.problem, after.rank)
        else:
            mean = np.mean(copies, axis=0)
            yield view.compared("weight update", update, name, after.values, mean, averaged(view, after.values, copies))


def averaged(view: View, observed: np.ndarray, copies: list[np.ndarray]) -> Distance:
    """Against the mean over workers: a few epsilon of the largest of their weights, since the order of a sum is free."""
    if {copy.shape for copy in copies} != {observed.shape}:
        return Distance(np.inf, 0.0, Verdict.FAIL)
    return elementwise(observed, np.mean(copies, axis=0), np.max(np.abs(copies), axis=0), view.eps, bitwise=False)


ALONE: tuple[Callable[[View, int], Checks], ...] = tuple(
    weight_update if check is checks.weight_update else check for check in PER_UPDATE
)
"""The checks of one update, in causal order, of a worker or of one device."""


def same_everywhere(view: View, update: int) -> Checks:
    """After an averaging all workers have the same weights, bit for bit."""
    everyone = workers_of(view)
    if not everyone or not averages(everyone[0], update):
        return
    first, *others = everyone
    for name in view.names("weight", update + 1):
        shared = first.whole("weight", name, update + 1)
        for worker in others:
            whole = worker.whole("weight", name, update + 1)
            if shared is not None and whole is not None and not equal_bits(shared.values, whole.values):
                words = f"not the weights of worker {first.rank}, bit for bit, though they were averaged"
                yield named(worker, worker.failed("weight update", update, name, words, worker.rank))
                break


def tells(view: View) -> Checks:
    """The case can tell if some worker's can, and if there is an averaging at all."""
    found = [check for worker in views_of(view) for check in checks.vacuity(worker)]
    yield next((check for check in found if check.verdict is Verdict.PASS), found[0])
    rule = view.expectation.semantics
    if view.expectation.workers and not any(local.averaged_after(rule, update) for update in range(view.case.updates)):
        words = f"no averaging within {view.case.updates} updates"
        yield Check("vacuity", view.case.updates - 1, "average", Verdict.INCONCLUSIVE, detail=words)


def named(view: View, check: Check) -> Check:
    """A check that says which worker it is of."""
    return replace(check, name=f"worker {view.rank}: {check.name}") if isinstance(view, Worker) else check


def of_worker(view: View, check: Check) -> tuple[View, Check]:
    """The worker's view that a check is of, and the check with the plain name; a check of no worker stays as it is."""
    found = re.match(r"worker (\d+): ", check.name)
    if not view.expectation.workers or found is None:
        return view, check
    return workers_of(view)[int(found[1])], replace(check, name=check.name[found.end() :])
