"""What the record of a case has to show: the reference trajectory and the rounding radius of every tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from equivtests.cases import numbers
from equivtests.cases.case import Case, Semantics
from equivtests.cases.parameters import initial, parameters
from equivtests.errors import CaseError
from equivtests.own import PREFIX
from equivtests.reference import update as one
from equivtests.reference.exact import Proof, prove
from equivtests.reference.forward import Weights
from equivtests.reference.rows import rows_of

VARIANTS = 6
KINK_DISTANCE = 1e-5  # least distance from a branch (`Sums.kink`) that a rounded case may have, in float32 and above
CLIP_DISTANCE = 1e-3  # least relative distance of the norm from the clip threshold

Radii = dict[str, float]


@dataclass
class Step:
    """One update of the reference. `skipped`: no valid token, nothing changes. found: all that its backward pass gave."""

    loss: float
    gradients: Weights
    norm: float
    coefficient: float
    rate: float
    steps: int
    skipped: bool
    kink: float
    found: one.Gradients | None = None


@dataclass
class Expectation:
    """The float64 trajectory and radii (distances as 2-norms over a tensor) of a case under a semantics.

    weights: entering each update, and after the last. radius[u]: by parameter, of the gradients; loss_radius[u].
    trajectory_radius: of the final weights, by parameter. proof: of the exact lane, if the case claims it.
    """

    case: Case
    semantics: Semantics
    steps: list[Step]
    weights: list[Weights]
    radius: list[Radii]
    loss_radius: list[float]
    trajectory_radius: Radii = field(default_factory=dict)
    proof: Proof | None = None

    def gradients_at(self, update: int, weights: Weights) -> one.Gradients:
        """Truth at observed weights (float64 copies of them); those of the reference's own trajectory are at hand."""
        own, known = self.weights[update], self.steps[update].found
        if known is not None and all(weights[n] is w or torch.equal(weights[n], w) for n, w in own.items()):
            return known
        return one.gradients(self.case, self.semantics, update, self.steps[update].steps, weights)


def canonical_weights(case: Case, dtype: torch.dtype = torch.float64) -> Weights:
    return {name: torch.from_numpy(value).to(dtype) for name, value in initial(case).items()}


@lru_cache(maxsize=1024)
def expect(case: Case, semantics: Semantics) -> Expectation:
    """Compute the expectation. Raises CaseError if the case is too close to a discontinuity, or not exact as claimed."""
    expectation = trajectory(case, semantics)
    refuse_discontinuities(expectation)
    if case.exact:
        expectation.proof = prove(case)
        if not expectation.proof.holds:
            raise CaseError(f"case {case.name!r} claims exact arithmetic, but {expectation.proof.where} is not exact")
    else:
        add_radii(expectation)
    return expectation


def trajectory(case: Case, semantics: Semantics) -> Expectation:
    """The float64 training run; a master copy of lower precision is a rounding, which the truth is free of."""
    exact = replace(semantics, master="none")
    weights, made = canonical_weights(case), 0
    states: one.States = {}
    expectation = Expectation(case, semantics, [], [weights], [{} for _ in case.windows], [0.0] * case.updates)
    for update in range(case.updates):
        current = reference_step(case, semantics, update, made, weights)
        if not current.skipped:
            weights, states = one.apply(case, exact, made, weights, current.gradients, current.coefficient, states)
            made += 1
        expectation.steps.append(current)
        expectation.weights.append(weights)
    return expectation


def reference_step(case: Case, semantics: Semantics, update: int, made: int, weights: Weights) -> Step:
    """Gradients, norm and clip coefficient at given weights."""
    skipped = case.tokens(update) == 0
    if skipped:
        return Step(0.0, {}, 0.0, 1.0, case.optimizer.rate(made), made, True, math.inf)
    found = one.gradients(case, semantics, update, made, weights)
    total = one.norm(found.values, case.optimizer.clip_norm)
    coefficient = one.clip_coefficient(case, semantics, total)
    return Step(found.loss, found.values, total, coefficient, case.optimizer.rate(made), made, False, found.kink, found)


def refuse_discontinuities(expectation: Expectation) -> None:
    """Raise CaseError where rounding could change a branch: a ReLU's kink, two experts, the clip threshold."""
    case = expectation.case
    for update, step in enumerate(expectation.steps):
        if not case.exact and step.kink < max(KINK_DISTANCE, 8 * loss_unit(case)):
            raise CaseError(
                f"case {case.name!r}: update {update} comes within {step.kink:.1e} of a branch (a ReLU's kink, or a choice "
                "between two experts); take another seed"
            )
        limit = case.optimizer.clip
        if limit and not step.skipped and abs(step.norm / limit - 1) < CLIP_DISTANCE:
            raise CaseError(f"case {case.name!r}: update {update} has norm {step.norm} at the clip threshold {limit}")


# ---------------------------------------------------------------------------------------------- radii


def add_radii(expectation: Expectation) -> None:
    """Run the case in its own precision under neutral re-orderings and keep the largest distances from the truth."""
    for variant in range(VARIANTS):
        _run_variant(expectation, variant)


def _run_variant(expectation: Expectation, variant: int) -> None:
    case, semantics = expectation.case, expectation.semantics
    dtype = getattr(torch, case.precision.weights)
    weights, made = canonical_weights(case, dtype), 0
    states: one.States = {}
    for update, expected in enumerate(expectation.steps):
        if expected.skipped:
            continue
        own = {n: w.double() for n, w in weights.items()}
        truth = one.gradients(case, semantics, update, made, own)
        moved = {n: nudge(case, w, f"{variant}.{update}.{n}") for n, w in weights.items()}
        found = one.gradients(case, semantics, update, made, moved, split(case, update, variant))
        _widen(expectation, update, found, truth)
        coefficient = one.clip_coefficient(case, semantics, one.norm(found.values, case.optimizer.clip_norm))
        weights, states = one.apply(case, semantics, made, weights, found.values, coefficient, states)
        made += 1
    for name, final in expectation.weights[-1].items():
        distance = float((weights[name].double() - final).norm())
        radii = expectation.trajectory_radius
        radii[name] = max(radii.get(name, 0.0), distance)


def _widen(expectation: Expectation, update: int, found: one.Gradients, truth: one.Gradients) -> None:
    radii = expectation.radius[update]
    for name, gradient in truth.values.items():
        distance = float((found.values[name].double() - gradient).norm())
        radii[name] = max(radii.get(name, 0.0), distance)
    losses = expectation.loss_radius
    losses[update] = max(losses[update], abs(found.loss - truth.loss))


@lru_cache(maxsize=1024)
def output_distances(case: Case, semantics: Semantics, update: int) -> list[np.ndarray]:
    """How far rounding to the case's precision leads the outputs of an update away from the truth, (N, L, V) per variant."""
    expectation = expect(case, semantics)
    draw, weights = expectation.steps[update].steps, expectation.weights[update]
    truth, dtype = one.outputs_at(case, update, draw, weights), getattr(torch, case.precision.compute)
    found = []
    for variant in range(VARIANTS):
        moved = {n: nudge(case, w.to(dtype), f"output.{variant}.{update}.{n}") for n, w in weights.items()}
        found.append((one.outputs_at(case, update, draw, moved, dtype).double() - truth).numpy())
    return found


def nudge(case: Case, weight: torch.Tensor, stream: str) -> torch.Tensor:
    """Move every element by -1, 0 or +1 half epsilon of its value: about one unit in the last place."""
    eps = torch.finfo(weight.dtype).eps / 2
    signs = torch.from_numpy(numbers.ternary(case.seed, f"nudge.{stream}", tuple(weight.shape)))
    return (weight.double() * (1 + eps * signs)).to(weight.dtype)


def split(case: Case, update: int, variant: int) -> one.Split:
    """Permuted rows in as many groups as there were ranks, or micro-batches where each one's gradient is rounded."""
    rows, precision = rows_of(case, update), case.precision
    order = torch.from_numpy(numbers.ranking(case.seed, f"split.{variant}.{update}", len(rows)))
    lossy = precision.compute == "bfloat16"
    groups = sum(rows.microbatches) if lossy else max(2, case.layout.dp)
    parts = [p for p in torch.tensor_split(order, min(groups, len(rows))) if len(p)]
    return one.Split(parts, getattr(torch, precision.compute), getattr(torch, precision.reduce))


def loss_unit(case: Case) -> float:
    """Epsilon of the coarsest dtype that a loss passes through."""
    return max(torch.finfo(getattr(torch, d)).eps for d in (case.precision.weights, case.precision.compute))


def gradient_unit(case: Case, semantics: Semantics = Semantics()) -> float:
    """Epsilon of the coarsest dtype that a gradient passes through: the loss's, what is sent, what the optimizer takes."""
    passed = (case.precision.reduce, *([] if semantics.master == "none" else [semantics.master]))
    return max(loss_unit(case), *(torch.finfo(getattr(torch, dtype)).eps for dtype in passed))


def layer_of(name: str) -> str:
    """The layer whose scale a tensor of true value zero is judged against: `layers.0`, `layers.0.attention`, `head`."""
    parent = name.removeprefix(PREFIX).rpartition(".")[0]
    above = parent.rpartition(".")[0]
    return parent if parent.rpartition(".")[2].isdigit() or not above else above


def trained_names(case: Case) -> list[str]:
    return [p.name for p in parameters(case.model) if p.trained]
