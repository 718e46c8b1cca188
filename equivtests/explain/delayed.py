"""Explanations of updates that come later than they could: which window's gradient was applied, clipped by what."""

from __future__ import annotations

from collections.abc import Iterator

from equivtests.explain.parts import close
from equivtests.judge.check import Check
from equivtests.judge.checks import expected_clip, number, states_of
from equivtests.judge.view import View
from equivtests.reference import update as one

Lines = Iterator[str]


def another_window(view: View, check: Check) -> Lines:
    """Is the update that of another window's gradient, or of another window's clip coefficient?"""
    if not view.expectation.semantics.staleness.delay:
        return
    due = view.expectation.steps[check.update].applies
    words = "in this update no gradient is due" if due is None else f"due is window {due}"
    passed = [w for w in range(check.update + 1) if not view.expectation.steps[w].skipped]
    for window in (w for w in passed if w != due):
        if made_of(view, check, window, window):
            yield f"the step was made with the gradient of window {window}; {words}"
        elif due is not None and made_of(view, check, due, window):
            yield f"the gradient of window {due} was clipped by the coefficient of window {window}"


def made_of(view: View, check: Check, window: int, clipped_as: int) -> bool:
    """Whether the parameter is what a step with a window's gradient, clipped as a window is, makes of it."""
    name, update = check.name, check.update
    gradient = view.at(window).tensors("gradient", window).get(name)
    weights, after = view.tensors("weight", update), view.tensors("weight", update + 1).get(name)
    if gradient is None or after is None or name not in weights:
        return False
    shown, step = number(view, "lr", update), view.expectation.steps[update]
    coefficient = expected_clip(view.at(clipped_as), clipped_as)
    rate, states, semantics = shown or step.rate, states_of(view, update), view.expectation.semantics
    found, _ = one.apply(view.case, semantics, step.steps, weights, {name: gradient}, coefficient, states, rate)
    return close(after.double().numpy(), found[name].double().numpy(), view)
