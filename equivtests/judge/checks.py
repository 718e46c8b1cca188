"""One function per compared quantity: each yields the checks of one update.

Stages keep one stage's rounding out of the next: gradients are judged at the observed weights, the norm against the
observed gradients, the update against the reference optimizer applied to what was observed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from equivtests.cases.case import Semantics
from equivtests.cases.parameters import initial
from equivtests.judge.arrivals import arrivals
from equivtests.judge.check import Check, Verdict
from equivtests.judge.feeds import fed
from equivtests.judge.forward import masks, outputs, routing
from equivtests.judge.schedule import schedule
from equivtests.judge.tolerance import Distance, elementwise, equal, radius_floor, rounded
from equivtests.judge.truth import truth_at
from equivtests.judge.versions import live, stream, versions
from equivtests.judge.view import View
from equivtests.own import UNKNOWN, loaded
from equivtests.reference import update as one
from equivtests.reference.expectation import layer_of, loss_unit, trained_names
from equivtests.reference.forward import Weights
from equivtests.reference.rows import rows_of
from equivtests.reference.versions import indistinguishable, made_before

Checks = Iterator[Check]


def initial_weights(view: View, update: int) -> Checks:
    """Weights entering the first update are the canonical ones, bit for bit, on every copy; so are constant buffers."""
    if update != 0:
        return
    dtype = np.dtype(view.case.precision.weights)
    if view.case.model.own:
        yield from constants(view, 0, 0, "initial weights")
    for name in set(view.names("weight", 0)) - set(initial(view.case)):
        yield view.failed("initial weights", 0, name, "the model has no parameter of this name")
    for name, value in initial(view.case).items():
        whole = view.whole("weight", name, 0)
        if whole is None:
            yield from view.absent("initial weights", 0, name, "weight")
        elif whole.problem:
            yield view.failed("initial weights", 0, name, whole.problem, whole.rank)
        elif whole.values.dtype != dtype:
            words = f"kept in {whole.values.dtype}, but the case says {dtype}"
            yield view.failed("initial weights", 0, name, words)
        else:
            expected = value.astype(dtype)
            yield view.compared("initial weights", 0, name, whole.values, expected, equal(whole.values, expected))


def exactly(view: View) -> float:
    """Unit of a number that has to be equal."""
    return 0.0


def working(view: View) -> float:
    """Unit of a number computed in the working precision: its epsilon."""
    return view.eps


def scalar(
    quantity: str, kind: str, expected: Callable[[View, int], float], unit: Callable[[View], float] = exactly
) -> Callable[[View, int], Checks]:
    """A check of one number that every rank shows, equal on all of them, in relative units."""

    def check(view: View, update: int) -> Checks:
        whole = view.whole(kind, kind, update)
        if whole is None:
            yield from view.absent(quantity, update, kind, kind)
        elif whole.problem:
            yield view.failed(quantity, update, kind, whole.problem, whole.rank)
        else:
            shown, wanted = number(view, kind, update), np.array(expected(view, update))
            if shown is None:
                yield view.failed(quantity, update, kind, f"has shape {whole.values.shape}, but it is one number")
                return
            error, size = abs(shown - float(wanted)), unit(view) * abs(float(wanted))
            ratio = 0.0 if error == 0 else (error / size if size and np.isfinite(error) else np.inf)
            verdict = Verdict.PASS if ratio <= view.threshold else Verdict.FAIL
            yield view.compared(quantity, update, kind, whole.values, wanted, Distance(ratio, 0.0, verdict))

    return check


def number(view: View, kind: str, update: int) -> float | None:
    """The one number of a kind, or None if no rank showed it or it is not one number."""
    whole = view.whole(kind, kind, update)
    return None if whole is None or whole.values.size != 1 else float(whole.values.item())


def samples(view: View, update: int) -> Checks:
    """The ids decoded from what reached the forward passes are those of the window, each once."""
    shown = fed(view.case, view.observations("inputs", update))
    if shown.problem:
        yield view.failed("samples", update, "ids", shown.problem, shown.rank)
        return
    by_rank = shown.samples(view.case.model)
    wanted = Counter(rows_of(view.case, update).ids.tolist())
    found = sum(by_rank.values(), Counter())
    skipped = view.expectation.steps[update].skipped
    if not by_rank and "inputs" not in view.strategy.observes:
        return
    if found == wanted or (skipped and not found):
        yield Check("samples", update, "ids", Verdict.PASS)
        return
    missing, extra = sorted((wanted - found).elements()), sorted((found - wanted).elements())
    fed_them = {data for data, ids in by_rank.items() if ids.keys() & set(extra)}
    layout = view.case.layout
    rank = next((rank for rank in range(layout.world) if layout.data_rank(rank) in fed_them), None)
    words = f"never fed: {missing or 'none'}; fed too often or not of this window: {extra or 'none'}"
    words += f" ({UNKNOWN}: inputs of no sample)" if UNKNOWN in extra else ""
    yield Check(
        "samples",
        update,
        "ids",
        Verdict.FAIL,
        np.inf,
        rank,
        f"{len(wanted)} samples",
        f"{found.total()} samples",
        words,
    )


def tokens(view: View, update: int) -> Checks:
    """Valid tokens are integers, the same on every rank, and those of the whole window."""
    shown = view.observations("tokens", update)
    if not shown:
        yield from view.absent("tokens", update, "tokens", "tokens")
        return
    wanted = view.case.tokens(update)
    wrong = [o for o in shown if o.array.dtype.kind not in "iu" or o.array.size != 1 or o.array.item() != wanted]
    if not wrong:
        yield Check("tokens", update, "tokens", Verdict.PASS)
        return
    first = wrong[0]
    counted = ", ".join(f"rank {o.rank}: {o.array}" for o in shown)
    kind = "" if first.array.dtype.kind in "iu" else f" (dtype {first.dtype}, must be an integer)"
    yield Check(
        "tokens", update, "tokens", Verdict.FAIL, np.inf, first.rank, str(wanted), str(first.array), counted + kind
    )


def loss(view: View, update: int) -> Checks:
    """The loss that was differentiated is the window's."""
    if view.expectation.steps[update].skipped:
        return
    whole = view.whole("loss", "loss", update)
    if whole is None:
        yield from view.absent("loss", update, "loss", "loss")
        return
    if whole.problem:
        yield view.failed("loss", update, "loss", whole.problem, whole.rank)
        return
    shown, truth = number(view, "loss", update), np.array(truth_at(view, update).loss)
    if shown is None:
        yield view.failed("loss", update, "loss", f"has shape {whole.values.shape}, but it is one number")
        return
    size = abs(float(truth))
    radius = max(view.expectation.loss_radius[update], loss_unit(view.case) * size)
    distance = judge_tensor(view, np.array(shown), truth, radius, size)
    yield view.compared("loss", update, "loss", np.array(shown), truth, distance)


def judge_tensor(view: View, observed: np.ndarray, truth: np.ndarray, radius: float, signal: float) -> Distance:
    """Tolerance zero where the case is proved exact, else the rounding radius."""
    if view.expectation.proof is not None:
        return equal(observed.astype(np.float64), truth)
    return rounded(observed, truth, radius, signal, view.threshold)


def gradient(view: View, update: int) -> Checks:
    """Gradients after accumulation and synchronization, before clipping; absent and zero are different."""
    if view.expectation.steps[update].skipped or not view.names("weight", update):
        return
    if not view.names("gradient", update):
        yield from view.absent("gradient", update, "all", "gradient")
        return
    truth = truth_at(view, update).values
    norms = {name: float(g.norm()) for name, g in truth.items()}
    for name in dict.fromkeys([*truth, *view.names("gradient", update)]):
        whole = view.whole("gradient", name, update)
        if name not in truth:
            yield view.failed("gradient", update, name, "present, but on one device it is absent (None is not zero)")
        elif whole is None:
            yield view.failed("gradient", update, name, "absent, but on one device it is present")
        elif whole.problem:
            yield view.failed("gradient", update, name, whole.problem, whole.rank)
        else:
            yield _gradient(view, update, name, whole.values, truth[name].numpy(), norms)


def _gradient(
    view: View, update: int, name: str, observed: np.ndarray, truth: np.ndarray, norms: dict[str, float]
) -> Check:
    if observed.shape != truth.shape:
        return view.failed("gradient", update, name, f"has shape {observed.shape}, the parameter {truth.shape}")
    scale = max(v for n, v in norms.items() if layer_of(n) == layer_of(name))
    floor = radius_floor(view.gradient_unit, norms[name], scale)
    radius = max(view.expectation.radius[update].get(name, 0.0), floor)
    signal = norms[name] if norms[name] > 1e-6 * scale else scale
    return view.compared("gradient", update, name, observed, truth, judge_tensor(view, observed, truth, radius, signal))


def observed_norm(view: View, update: int) -> float:
    return one.norm(view.tensors("gradient", update), view.case.optimizer.clip_norm)


def expected_clip(view: View, update: int) -> float:
    """The coefficient that follows from the observed norm."""
    shown = number(view, "norm", update)
    total = observed_norm(view, update) if shown is None else shown
    return one.clip_coefficient(view.case, view.expectation.semantics, total)


def clipping(check: Callable[[View, int], Checks]) -> Callable[[View, int], Checks]:
    """Only where the case clips and the window is not empty."""

    def guarded(view: View, update: int) -> Checks:
        if view.case.optimizer.clip is not None and not view.expectation.steps[update].skipped:
            yield from check(view, update)

    return guarded


def stepping(check: Callable[[View, int], Checks]) -> Callable[[View, int], Checks]:
    """Only where the optimizer steps."""

    def guarded(view: View, update: int) -> Checks:
        if view.expectation.steps[update].applies is not None:
            yield from check(view, update)

    return guarded


def applied_under(view: View, update: int, semantics: Semantics) -> tuple[Weights, one.States]:
    """The reference optimizer on what was observed: weights, state, gradients and clip coefficient."""
    weights = view.tensors("weight", update)
    expected = view.expectation.steps[update]
    window = expected.applies
    if window is None:
        return weights, states_of(view, update)
    source = view.at(window)
    clip, rate = number(source, "clip", window), number(view, "lr", update)
    coefficient = expected_clip(source, window) if clip is None else clip
    coefficient = 1.0 if semantics.clip_scope == "none" else coefficient
    used = expected.rate if rate is None else rate
    found = source.tensors("gradient", window)
    trained = [n for n in trained_names(view.case) if n in found and n in weights]
    values = {n: found[n] for n in trained if found[n].shape == weights[n].shape}
    return one.apply(view.case, semantics, expected.steps, weights, values, coefficient, states_of(view, update), used)


def states_of(view: View, update: int) -> one.States:
    """Optimizer state entering an update: what was observed, or what the updates before it must have left."""
    if "state" not in view.strategy.observes:
        return applied_once(view, update - 1)[1] if update > view.record.start else view.entering
    states: one.States = {}
    for name, tensor in view.tensors("state", update).items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = tensor
    return states


NO_STEP = (ArithmeticError, RuntimeError, TypeError, ValueError)
"""What the reference optimizer raises where what was shown has shapes or values that no optimizer could use."""


def weight_update(view: View, update: int) -> Checks:
    """Weights after the step are those of the reference optimizer applied to the observed gradients and state."""
    window = view.expectation.steps[update].applies
    if window is not None and not view.at(window).names("gradient", window):
        return
    try:
        new, _ = applied_once(view, update)
    except NO_STEP as error:
        words = f"no step can be made from the state, rate, coefficient and gradients that were shown: {error}"
        yield view.failed("weight update", update, "all", words.splitlines()[0])
        return
    for name, expected in new.items():
        after, before = view.whole("weight", name, update + 1), view.whole("weight", name, update)
        if after is None or before is None:
            yield from view.absent("weight update", update, name, "weight")
        elif after.problem:
            yield view.failed("weight update", update, name, after.problem, after.rank)
        else:
            distance = elementwise(after.values, expected.numpy(), before.values, view.eps, view.bitwise)
            yield view.compared("weight update", update, name, after.values, expected.numpy(), distance)


def applied_once(view: View, update: int) -> tuple[Weights, one.States]:
    key = f"applied.{update}"
    if key not in view.cache:
        view.cache[key] = applied_under(view, update, view.expectation.semantics)
    return view.cache[key]


def optimizer_state(view: View, update: int) -> Checks:
    """Optimizer state after the step, step counters included."""
    if "state" not in view.strategy.observes:
        return
    entered = view.tensors("state", update)
    try:
        _, states = applied_once(view, update)
    except NO_STEP:
        return  # as a fault of the weight update, which cannot be made
    if update == 0 and any(tensor.any() for tensor in entered.values()):
        name = next(name for name, tensor in entered.items() if tensor.any())
        yield view.failed(
            "optimizer state", update, name, "not zero before the first update: left over from another run?"
        )
        return
    expected = {f"{p}/{key}": tensor for p, state in states.items() for key, tensor in state.items()}
    for name in dict.fromkeys([*expected, *view.names("state", update + 1)]):
        whole = view.whole("state", name, update + 1)
        if whole is None:
            yield view.failed("optimizer state", update, name, "absent, but on one device it is present")
        elif name not in expected:
            yield view.failed("optimizer state", update, name, "present, but on one device it is absent")
        elif whole.problem:
            yield view.failed("optimizer state", update, name, whole.problem, whole.rank)
        else:
            wanted, before = expected[name].numpy(), entered.get(name)
            start = np.zeros_like(wanted) if before is None or before.shape != wanted.shape else before.numpy()
            distance = elementwise(whole.values, wanted, start, view.eps, view.bitwise)
            yield view.compared("optimizer state", update, name, whole.values, wanted, distance)


def constants(view: View, update: int, entering: int, quantity: str) -> Checks:
    """Buffers of a user's own model that enter an update are those that it was built with, on every rank."""
    expected = loaded(view.case.model.own).buffers
    for name in view.names("buffer", entering):
        whole = view.whole("buffer", name, entering)
        if whole is None or name not in expected:
            yield view.failed(quantity, update, name, "the model has no buffer of this name")
        elif whole.problem:
            yield view.failed(quantity, update, name, whole.problem, whole.rank)
        else:
            wanted = expected[name].astype(whole.values.dtype)
            yield view.compared(quantity, update, name, whole.values, wanted, equal(whole.values, wanted))


def buffers(view: View, update: int) -> Checks:
    """Running statistics move by those over the rows of all ranks, and are the same on every rank."""
    if view.case.model.own:
        yield from constants(view, update, update + 1, "buffer")
        return
    names = dict.fromkeys([*view.names("buffer", update), *view.names("buffer", update + 1)])
    if view.case.model.keeps_statistics and not names:
        yield from view.absent("buffer", update, "all", "buffer")
    for name in names:
        after, before = view.whole("buffer", name, update + 1), view.whole("buffer", name, update)
        if update == 0 and before is not None and before.values.any():
            yield view.failed("buffer", update, name, "not zero before the first update: left over from another run?")
            continue
        if after is None or before is None:
            yield from view.absent("buffer", update, name, "buffer")
            continue
        if after.problem:
            yield view.failed("buffer", update, name, after.problem, after.rank)
            continue
        skipped = view.expectation.steps[update].skipped
        hidden, size = (None, 0.0) if skipped else truth_at(view, update).toward(name)
        if hidden is not None and before.values.shape != tuple(hidden.shape):
            detail = f"has shape {before.values.shape}, the activations {tuple(hidden.shape)}"
            yield view.failed("buffer", update, name, detail)
            continue
        start = before.values.astype(np.float64)
        truth = start if hidden is None else start + 0.25 * (hidden.numpy() - start)
        signal = max(float(np.linalg.norm(truth)), 1e-3)
        distance = rounded(after.values, truth, loss_unit(view.case) * max(signal, size), signal, view.threshold)
        yield view.compared("buffer", update, name, after.values, truth, distance)


def weight_norm(view: View, update: int) -> Checks:
    """The norm of all weights, where a framework logs it, is that of the weights after the update."""
    whole = view.whole("weight_norm", "weight_norm", update)
    if whole is None:
        yield from view.absent("weight norm", update, "weight_norm", "weight_norm")
        return
    if whole.problem:
        yield view.failed("weight norm", update, "weight_norm", whole.problem, whole.rank)
        return
    shown, truth = number(view, "weight_norm", update), np.array(one.norm(view.tensors("weight", update + 1), "2"))
    if shown is None:
        yield view.failed("weight norm", update, "weight_norm", f"has shape {whole.values.shape}, but it is one number")
        return
    distance = rounded(np.array(shown), truth, view.eps * float(truth), float(truth), view.threshold)
    yield view.compared("weight norm", update, "weight_norm", np.array(shown), truth, distance)


def trajectory(view: View) -> Checks:
    """The weights after the last update, against the reference's own trajectory."""
    first, last = view.expectation.weights[0], view.expectation.weights[-1]
    for name, truth in last.items():
        whole = view.whole("weight", name, view.case.updates)
        if whole is None or whole.problem:
            continue
        norm, moved = float(truth.norm()), float((truth - first[name]).norm())
        floor = max(view.eps * norm, view.gradient_unit * moved)
        radius = max(view.expectation.trajectory_radius.get(name, 0.0), floor)
        signal = moved if moved else norm
        yield view.compared(
            "trajectory", view.case.updates - 1, name, whole.values, truth.numpy(),
            judge_tensor(view, whole.values, truth.numpy(), radius, signal),
        )  # fmt: skip


def vacuity(view: View) -> Checks:
    """The case must be able to tell: gradients and updates stand above the tolerance."""
    first, last = view.expectation.weights[0], view.expectation.weights[-1]
    moved = sum(float((last[n] - w).norm()) ** 2 for n, w in first.items()) ** 0.5
    unit = view.eps * sum(float(w.norm()) ** 2 for w in last.values()) ** 0.5
    steps = view.expectation.steps
    idle_clip = view.case.optimizer.clip is not None and all(s.coefficient == 1 for s in steps)
    if all(step.skipped for step in steps):
        verdict, detail = Verdict.PASS, "every window is empty: nothing may change"
    elif not tells_staleness(view):
        verdict, detail = Verdict.INCONCLUSIVE, "too few updates: they cannot be told from those of one device"
    elif idle_clip and view.expectation.semantics.clip_scope != "none":
        verdict, detail = Verdict.FAIL, "the case asks for clipping, but no update reaches the threshold"
    elif moved <= view.threshold * unit:
        verdict, detail = Verdict.FAIL, f"all updates together move the weights by {moved:.1e}, below the tolerance"
    else:
        verdict, detail = Verdict.PASS, ""
    yield Check("vacuity", view.case.updates - 1, "update", verdict, detail=detail)


def tells_staleness(view: View) -> bool:
    """Whether a case that is judged by a stale rule has updates in which it differs from one device's."""
    rule, case = view.expectation.semantics.staleness, view.case
    if rule.versions == "newest" and not rule.delay:
        return True
    applied = [step.applies for step in view.expectation.steps]
    return applied != list(range(case.updates)) or "newest" not in indistinguishable(case, view.expectation.semantics)


def sharding(view: View) -> Checks:
    """What is claimed to be cut over ranks is: a wrapper that wrapped nothing is found here."""
    layout = view.case.layout
    cut = sorted(layout.splits & {"tp", "pp", "ep"})
    if "weights" in view.strategy.shards and layout.shard > 1:
        cut.append("the data ranks")
    if cut and all_hold_everything(view):
        words = f"the weights are claimed to be cut over {' and '.join(cut)}, but every rank holds all of them"
        yield view.failed("vacuity", view.case.updates - 1, "shards", words)
    if layout.cp > 1 and whole_sequences(view):
        words = "sequences are claimed to be cut over cp, but every rank was fed whole ones"
        yield view.failed("vacuity", view.case.updates - 1, "sequences", words)


def all_hold_everything(view: View) -> bool:
    shown: Counter[int] = Counter()
    for o in view.observations("weight", view.record.start):
        shown[o.rank] += o.array.size
    everything = sum(w.numel() for w in view.expectation.weights[0].values())
    return sum(size >= everything for size in shown.values()) == view.record.world


def whole_sequences(view: View) -> bool:
    shown = [o for update in view.updates for o in view.observations("inputs", update)]
    return bool(shown) and all(o.place.size == math.prod(o.place.shape) for o in shown)


def loss_scale_of(view: View, update: int) -> float:
    scaling = view.case.precision.loss_scale
    if scaling is None:
        return 1.0
    return scaling.initial * 2.0 ** (made(view, update) // scaling.growth_interval)


def made(view: View, update: int) -> int:
    """Optimizer updates made before window `update`."""
    return sum(step.applies is not None for step in view.expectation.steps[:update])


def drawn(view: View, update: int) -> int:
    """Draws of the dropout stream before window `update`: one for every window with a valid token, applied yet or not."""
    return made_before(view.case, update)


COUNTERS: tuple[Callable[[View, int], Checks], ...] = (
    scalar("cursor", "cursor", lambda view, update: update),
    scalar("step", "step", made),
    scalar("random state", "random_state", drawn),
    scalar("loss scale", "loss_scale", loss_scale_of),
)
"""What counts updates; checked entering every update and after the last."""

PER_UPDATE: tuple[Callable[[View, int], Checks], ...] = (
    initial_weights,
    *COUNTERS,
    samples,
    tokens,
    schedule,
    arrivals,
    stream,
    versions,
    masks,
    routing,
    outputs,
    loss,
    gradient,
    clipping(scalar("norm", "norm", observed_norm, working)),
    clipping(scalar("clip coefficient", "clip", expected_clip, working)),
    stepping(
        scalar("learning rate", "lr", lambda view, update: view.expectation.steps[update].rate, lambda view: 2.0**-52)
    ),
    weight_update,
    optimizer_state,
    stepping(weight_norm),
    buffers,
)
"""The checks of one update, in causal order."""

AT_THE_END: tuple[Callable[[View], Checks], ...] = (live, trajectory, vacuity, sharding)
