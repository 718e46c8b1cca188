"""Explanations of local SGD: what was averaged instead of the workers' stepped weights, and what should not have been."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equivtests.explain.parts import close
from equivtests.judge.check import Check
from equivtests.judge.checks import applied_once
from equivtests.judge.local import Worker, averages, stepped
from equivtests.judge.truth import truth_at
from equivtests.judge.view import View

Lines = Iterator[str]


def other_average(view: View, check: Check) -> Lines:
    """What else the weights are that a worker has after its step."""
    after = view.whole("weight", check.name, check.update + 1)
    if not isinstance(view, Worker) or after is None:
        return
    shown = after.values.astype(np.float64)
    candidates = averages_of(view, check) if averages(view, check.update) else early_averages(view, check)
    yield from (words for words, value in candidates if close(shown, value, view))


def steps_of(view: Worker, check: Check) -> np.ndarray:
    """By worker, one parameter after the worker's own step."""
    return np.stack([stepped(worker, check.update)[check.name].double().numpy() for worker in view.everyone])


def entering(view: Worker, check: Check) -> np.ndarray:
    """By worker, one parameter before the worker's step."""
    return np.stack([worker.tensors("weight", check.update)[check.name].double().numpy() for worker in view.everyone])


def averages_of(view: Worker, check: Check) -> Iterator[tuple[str, np.ndarray]]:
    """Where an average is due: in words, and the weights that it would give."""
    steps, before, own = steps_of(view, check), entering(view, check), view.rank
    count, tokens = len(steps), np.array([worker.case.tokens(check.update) for worker in view.everyone], dtype=float)
    yield "these are the worker's own stepped weights: it did not take over the average", steps[own]
    yield "this is the sum over the workers: it was not divided by their number", steps.sum(axis=0)
    yield "this is the average of the weights before the step", before.mean(axis=0)
    moved = before.mean(axis=0) + steps[own] - before[own]
    yield "weights were averaged before the step, and each worker then made its own", moved
    yield "the average is weighted by valid tokens", np.tensordot(tokens / max(1.0, tokens.sum()), steps, axes=1)
    for rank in range(count):
        others = steps.sum(axis=0) - steps[rank]
        yield f"worker {rank} is left out of the average", others / max(1, count - 1)
        yield f"worker {rank} counts as zero in the average", others / count


def early_averages(view: Worker, check: Check) -> Iterator[tuple[str, np.ndarray]]:
    """Where none is due, the average that was made all the same."""
    period = view.expectation.semantics.staleness.period
    words = f"weights were averaged after window {check.update}; they are after every {period} windows"
    yield words, steps_of(view, check).mean(axis=0)


def reduced_gradient(view: View, check: Check) -> Lines:
    """Is it the mean of the workers' gradients, as in synchronous training?"""
    whole = view.whole("gradient", check.name, check.update)
    if not isinstance(view, Worker) or whole is None:
        return
    making = [worker for worker in view.everyone if not worker.expectation.steps[check.update].skipped]
    own = [truth_at(worker, check.update).values.get(check.name) for worker in making]
    total = np.sum([gradient.numpy() for gradient in own if gradient is not None], axis=0)
    if close(whole.values.astype(np.float64), total / len(view.everyone), view):
        yield "this is the mean of all workers' gradients: it was reduced, but workers step alone"


def averaged_state(view: View, check: Check) -> Lines:
    """Was optimizer state averaged along with the weights?"""
    whole = view.whole("state", check.name, check.update + 1)
    if not isinstance(view, Worker) or whole is None:
        return
    parameter, _, key = check.name.rpartition("/")
    states = [applied_once(worker, check.update)[1].get(parameter, {}) for worker in view.everyone]
    held = [state[key].double().numpy() for state in states if key in state]
    if len(held) == len(states) and close(whole.values.astype(np.float64), np.mean(held, axis=0), view):
        yield "this is the mean over the workers: their state was averaged, but it stays each worker's own"
