"""What the reference says at the weights that were observed."""

from __future__ import annotations

from equivtests.judge.view import View
from equivtests.reference import update as one
from equivtests.reference.forward import Weights


def observed_weights(view: View, update: int) -> Weights:
    """The weights entering an update as they were shown, float64; the reference's own where none fits."""
    own, shown = view.expectation.weights[update], view.tensors("weight", update)
    return own | {n: shown[n].double() for n, w in own.items() if n in shown and shown[n].shape == w.shape}


def truth_at(view: View, update: int) -> one.Gradients:
    """The float64 gradients of the window at the observed weights."""
    key = f"truth.{update}"
    if key not in view.cache:
        view.cache[key] = view.expectation.gradients_at(update, observed_weights(view, update))
    found: one.Gradients = view.cache[key]
    return found
