"""What the reference says at the weights that were observed."""

from __future__ import annotations

from equivtests.cases.staleness import Staleness
from equivtests.judge.view import View
from equivtests.reference import update as one
from equivtests.reference.forward import Weights
from equivtests.reference.versions import History, Seen, seen


def observed_weights(view: View, update: int) -> Weights:
    """The weights entering an update as they were shown, float64; the reference's own where none fits."""
    key = f"weights.{update}"
    if key not in view.cache:
        own, shown = view.expectation.weights[update], view.tensors("weight", update)
        fits = {n: shown[n].double() for n, w in own.items() if n in shown and shown[n].shape == w.shape}
        view.cache[key] = own | fits
    found: Weights = view.cache[key]
    return found


def observed_states(view: View, update: int) -> one.States:
    """The optimizer states entering an update as they were shown, float64."""
    states: one.States = {}
    for name, tensor in view.tensors("state", update).items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = tensor.double()
    return states


def seen_by(view: View, window: int, staleness: Staleness | None = None) -> Seen:
    """The observed weights that the passes of a window have to use, under the declared rule or another one."""

    def entered(version: int) -> tuple[View, int]:
        update = view.expectation.entering(version, window)
        return view.at(update), update

    history = History(
        lambda version: observed_weights(*entered(version)), lambda version: observed_states(*entered(version))
    )
    rule = view.expectation.semantics.staleness if staleness is None else staleness
    return seen(view.case, rule, window, history)


def truth_at(view: View, window: int) -> one.Gradients:
    """The float64 gradients of the window at the observed weights that it has to use."""
    key = f"truth.{window}"
    if key not in view.cache:
        view.cache[key] = view.expectation.gradients_at(window, seen_by(view, window))
    found: one.Gradients = view.cache[key]
    return found
