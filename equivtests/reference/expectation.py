"""What the record of a case has to show: the reference trajectory and the rounding radius of every tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from equivtests.cases import numbers
from equivtests.cases.case import Case, Semantics
from equivtests.cases.parameters import initial, parameters
from equivtests.cases.staleness import Staleness
from equivtests.errors import CaseError
from equivtests.own import PREFIX
from equivtests.reference import local, versions
from equivtests.reference import update as one
from equivtests.reference.exact import Proof, prove
from equivtests.reference.forward import Weights
from equivtests.reference.rows import rows_of
from equivtests.reference.versions import History, Seen

VARIANTS = 8
KINK_DISTANCE = 1e-5  # least distance from a branch (`Sums.kink`) that a rounded case may have, in float32 and above
CLIP_DISTANCE = 1e-3  # least relative distance of the norm from the clip threshold

Radii = dict[str, float]


@dataclass
class Step:
    """What one window gives, and what the update of its number makes of a window: mostly of the same one.

    loss, gradients, norm, coefficient, kink, found: of the window (found: all that its backward pass gave). skipped: it has
    no valid token. rate: learning rate of the update. steps: updates made before. applies: the window whose gradient the
    update applies, None if no update is made. factor: on its learning rate, where a late gradient counts less.
    """

    loss: float
    gradients: Weights
    norm: float
    coefficient: float
    rate: float
    steps: int
    skipped: bool
    kink: float
    found: one.Gradients | None = None
    applies: int | None = None
    factor: float = 1.0


@dataclass
class Expectation:
    """The float64 trajectory and radii (distances as 2-norms over a tensor) of a case under a semantics.

    weights: entering each update, and after the last. radius[u]: by parameter, of the gradients; loss_radius[u].
    trajectory_radius: of the final weights, by parameter. proof: of the exact lane, if the case claims it.
    workers: under local SGD, what each worker alone has to show (its case names it); the whole then repeats the first one.
    """

    case: Case
    semantics: Semantics
    steps: list[Step]
    weights: list[Weights]
    radius: list[Radii]
    loss_radius: list[float]
    trajectory_radius: Radii = field(default_factory=dict)
    proof: Proof | None = None
    workers: tuple[Expectation, ...] = ()

    @property
    def alone(self) -> tuple[Expectation, ...]:
        """The expectations that a record is judged by: of every worker that steps alone, or just this one."""
        return self.workers or (self,)

    def seen(self, window: int, history: History) -> Seen:
        """The weights that the passes of a window use, of observed ones."""
        return versions.seen(self.case, self.semantics.staleness, window, history)

    def gradients_at(self, window: int, used: Seen) -> one.Gradients:
        """Truth at observed weights (float64 copies of them); those of the reference's own trajectory are at hand."""
        known = self.steps[window].found
        own = self.weights[window] if replace(self.semantics.staleness, period=0) == Staleness() else None
        if (
            known is not None
            and own is not None
            and all(used.forward[n] is w or torch.equal(used.forward[n], w) for n, w in own.items())
        ):
            return known
        draw = versions.made_before(self.case, window)
        return one.gradients(self.case, self.semantics, window, draw, used.forward, backward=used.backward)

    def entering(self, version: int, window: int) -> int:
        """The update that weights of a version enter, as a window uses them: of several the last one not after it.

        A version enters several where no update is made between them; an averaging may change it all the same.
        """
        found = [update for update, step in enumerate(self.steps) if step.steps == version] or [len(self.steps)]
        return max((update for update in found if update <= window), default=found[0])


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


class Course:
    """A training run of the reference, window by window: weights and states of every version, and gradients at those."""

    def __init__(self, case: Case, semantics: Semantics, dtype: torch.dtype) -> None:
        self.case, self.semantics = case, semantics
        self.weights: list[Weights] = [canonical_weights(case, dtype)]
        self.states: list[one.States] = [{}]
        self.history = History(lambda version: self.weights[version], lambda version: self.states[version])

    @property
    def made(self) -> int:
        return len(self.weights) - 1

    def seen(self, window: int) -> Seen:
        return versions.seen(self.case, self.semantics.staleness, window, self.history)

    def knows(self, window: int) -> bool:
        """Whether the versions that a window uses are all made."""
        used = versions.used(self.case, self.semantics.staleness, window)
        return all(max(stage.forward, stage.backward) <= self.made for stage in used)

    def ready(self, window: int, update: int) -> bool:
        """Whether a window can be passed before an update; where weights are averaged meanwhile, not early."""
        return self.knows(window) and (window <= update or not self.semantics.staleness.period)

    def step(self, semantics: Semantics, values: Weights, coefficient: float, factor: float) -> None:
        """Make the next version from the gradients of a window."""
        rate = self.case.optimizer.rate(self.made) * factor
        new, states = one.apply(
            self.case, semantics, self.made, self.weights[-1], values, coefficient, self.states[-1], rate
        )
        self.weights.append(new)
        self.states.append(states)


def trajectory(case: Case, semantics: Semantics) -> Expectation:
    """The float64 training run; a master copy of lower precision is a rounding, which the truth is free of."""
    exact = replace(semantics, master="none")
    found = [blank(alone, semantics) for alone in local.workers_of(case, semantics)]
    courses = [Course(expectation.case, exact, torch.float64) for expectation in found]
    for update in range(case.updates):
        for expectation, course in zip(found, courses, strict=True):
            make_update(expectation, course, update)
        end_update(courses, update)
        for expectation, course in zip(found, courses, strict=True):
            expectation.weights.append(course.weights[-1])
    return replace(found[0], case=case, workers=tuple(found)) if semantics.staleness.period else found[0]


def blank(case: Case, semantics: Semantics) -> Expectation:
    """An expectation before the first update."""
    steps = [blank_step(case, window) for window in range(case.updates)]
    return Expectation(case, semantics, steps, [canonical_weights(case)], [{} for _ in steps], [0.0] * len(steps))


def make_update(expectation: Expectation, course: Course, update: int) -> None:
    """Pass the windows that can be, and step with the one that is due."""
    case, semantics, steps = expectation.case, expectation.semantics, expectation.steps
    for window, other in enumerate(steps):
        if other.found is None and not other.skipped and course.ready(window, update):
            pass_window(case, semantics, other, window, course)
    step = steps[update]
    step.steps = course.made
    step.applies, step.factor = versions.applies(case, semantics.staleness, update, course.made)
    step.rate = case.optimizer.rate(course.made) * step.factor
    if step.applies is not None:
        given = steps[step.applies]
        if given.found is None:
            words = (
                f"update {update} applies window {step.applies}, whose weights are of an update that is not made yet"
            )
            raise CaseError(f"case {case.name!r}: {words} (semantics.staleness)")
        course.step(course.semantics, given.gradients, given.coefficient, step.factor)


def end_update(courses: Sequence[Course], update: int) -> None:
    """Where workers step alone, and an average is due, put the mean of their newest weights in place of these."""
    if local.averaged_after(courses[0].semantics, update):
        shared = local.mean([course.weights[-1] for course in courses])
        for course in courses:
            course.weights[-1] = shared


def blank_step(case: Case, window: int) -> Step:
    return Step(0.0, {}, 0.0, 1.0, 0.0, 0, case.tokens(window) == 0, math.inf)


def pass_window(case: Case, semantics: Semantics, step: Step, window: int, course: Course) -> None:
    """Fill in what a window gives at the weights that it has to use."""
    used = course.seen(window)
    draw = versions.made_before(case, window)
    found = one.gradients(case, semantics, window, draw, used.forward, backward=used.backward)
    step.found, step.loss, step.gradients, step.kink = found, found.loss, found.values, found.kink
    step.norm = one.norm(found.values, case.optimizer.clip_norm)
    step.coefficient = one.clip_coefficient(case, semantics, step.norm)


def refuse_discontinuities(expectation: Expectation) -> None:
    """Raise CaseError where rounding could change a branch: a ReLU's kink, two experts, the clip threshold."""
    for worker in expectation.workers:
        refuse_discontinuities(worker)
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
        _run_variant(expectation.alone, variant)


def _run_variant(found: Sequence[Expectation], variant: int) -> None:
    dtype = getattr(torch, found[0].case.precision.weights)
    courses = [Course(expectation.case, expectation.semantics, dtype) for expectation in found]
    given: list[dict[int, Weights]] = [{} for _ in found]
    for update in range(len(found[0].steps)):
        for expectation, course, passed in zip(found, courses, given, strict=True):
            _update_variant(expectation, variant, update, course, passed)
        end_update(courses, update)
    for expectation, course in zip(found, courses, strict=True):
        radii = expectation.trajectory_radius
        for name, final in expectation.weights[-1].items():
            distance = float((course.weights[-1][name].double() - final).norm())
            radii[name] = max(radii.get(name, 0.0), distance)


def _update_variant(
    expectation: Expectation, variant: int, update: int, course: Course, given: dict[int, Weights]
) -> None:
    """`make_update` of one re-ordering. given: gradients of the windows passed so far; it grows."""
    case, semantics, step = expectation.case, expectation.semantics, expectation.steps[update]
    for window, other in enumerate(expectation.steps):
        if window not in given and not other.skipped and course.ready(window, update):
            given[window] = _pass_variant(expectation, variant, window, course)
    if step.applies is not None:
        values = given[step.applies]
        coefficient = one.clip_coefficient(case, semantics, one.norm(values, case.optimizer.clip_norm))
        course.step(semantics, values, coefficient, step.factor)


def _pass_variant(expectation: Expectation, variant: int, window: int, course: Course) -> Weights:
    """Gradients of a window under one re-ordering, in the case's precision; the radii grow to hold their distance."""
    case, semantics = expectation.case, expectation.semantics
    used, draw = course.seen(window), versions.made_before(case, window)
    behind = used.backward and double(used.backward)
    truth = one.gradients(case, semantics, window, draw, double(used.forward), backward=behind)
    moved = {n: nudge(case, w, f"{variant}.{window}.{n}") for n, w in used.forward.items()}
    backward = used.backward and {n: nudge(case, w, f"{variant}.{window}.{n}") for n, w in used.backward.items()}
    found = one.gradients(case, semantics, window, draw, moved, split(case, window, variant), backward=backward)
    _widen(expectation, window, found, truth)
    return found.values


def double(weights: Weights) -> Weights:
    return {name: weight.double() for name, weight in weights.items()}


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
    own = History(lambda version: expectation.weights[expectation.entering(version, update)], lambda version: {})
    draw, weights = versions.made_before(case, update), expectation.seen(update, own).forward
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
