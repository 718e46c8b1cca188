"""The judge is a pure function: correct records pass, and any one wrong number is named first."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import SCALED, SINGLE, cases
from synthetic import (
    CUTS,
    STRATEGY,
    Value,
    altered,
    at_largest,
    changed,
    one_ulp,
    place,
    record_of,
    values_of,
    with_part,
)

from equivtests.cases.case import DOUBLE, Case, Layout, Model, Optimizer, Precision
from equivtests.cases.grid import DYADIC, GRID, POWERS, Row
from equivtests.errors import CaseError
from equivtests.judge import tolerance
from equivtests.judge.check import QUANTITIES, Check, Judgement, Verdict
from equivtests.judge.judge import judge
from equivtests.judge.restore import going_on, judge_restored
from equivtests.judge.view import View
from equivtests.record.observation import Observation, Record
from equivtests.reference.expectation import Expectation, expect

SHARP = (SINGLE, DOUBLE, SCALED)  # precisions in which an error of 1e-3 stands far above rounding


def accepted(case: Case) -> Expectation:
    """The expectation; cases near a discontinuity are not examples."""
    try:
        return expect(case, case.semantics)
    except CaseError:
        assume(False)
        raise


def judged(case: Case, record: Record, **options: Any) -> Judgement:
    return judge(case, STRATEGY, record, accepted(case), **options)


def cannot_tell(check: Check) -> bool:
    """The two ways in which a correct run may not pass: its signal drowns in rounding, or the case is vacuous."""
    drowned = check.verdict is Verdict.INCONCLUSIVE and check.resolution >= 0.25
    return drowned or check.quantity == "vacuity"


# ----------------------------------------------------------------------------------------- correct records


@settings(max_examples=40)
@given(cases(precisions=SHARP), st.sampled_from(CUTS))
def test_a_correct_record_never_fails_and_stays_far_from_the_threshold(case: Case, cut: Any) -> None:
    judgement = judged(case, record_of(case, cut))
    wrong = [c for c in judgement.checks if c.verdict is not Verdict.PASS and not cannot_tell(c)]
    assert not wrong
    assert max(judgement.worst().values()) < 4


LOSSY = [row for row in GRID if row.make(4, 0).precision.label not in ("float32", "float64")]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("row", LOSSY, ids=lambda row: row.name)
def test_correct_records_in_low_precision_stay_far_from_the_threshold(row: Row, cut: Any) -> None:
    """In tiny cases of any shape the radius of bfloat16 rests on too few roundings; the grid is chosen."""
    case = row.make(4, 0)
    judgement = judged(case, record_of(case, cut))
    assert judgement.verdict is Verdict.PASS and 0 < max(judgement.worst().values()) < 4


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("precision", SHARP)
def test_a_plain_correct_record_passes_in_every_quantity(cut: Any, precision: Precision) -> None:
    """Not vacuous: everything that can be compared has been."""
    case = plain(precision=precision)
    judgement = judged(case, record_of(case, cut))
    assert judgement.verdict is Verdict.PASS and judgement.first is None
    unseen = {"collectives", "bytes", "weight norm", "schedule", "dropout mask", "routing", "output"}
    unseen |= {q for q in QUANTITIES if q.startswith(("restored", "replayed"))} | {
        "versions",
        "live versions",
        "arrivals",
    }
    assert {c.quantity for c in judgement.checks} == set(QUANTITIES) - unseen
    assert judgement.resolution() < 1e-3


def plain(**changes: Any) -> Case:
    """Four ranks, two updates, Adam, clipping, running statistics: something of every kind."""
    windows = ((((3, 2),), ((5,), (1,)), (), ((8,),)), (((1,),), ((4,),), ((2, 2),), ((7,),)))
    model = Model("mlp", width=4, features=("bias", "running"))
    optimizer = Optimizer("adamw", lr=2.0**-6, weight_decay=0.125, eps=2.0**-12, clip=0.25)
    return Case("plain", model, windows, Layout(4), optimizer, accumulation=2).replace(**changes)


@settings(max_examples=15)
@given(cases(precisions=SHARP), st.sampled_from(CUTS))
def test_judging_changes_nothing_and_says_the_same_again(case: Case, cut: Any) -> None:
    record = record_of(case, cut)
    before = copy.deepcopy(record)
    first, second = judged(case, record), judged(case, record)
    assert first == second
    for o, b in zip(record.observations, before.observations, strict=True):
        assert dataclasses.replace(o, array=b.array) == dataclasses.replace(b, array=b.array)
        assert o.array.tobytes() == b.array.tobytes()


def told(judgement: Judgement) -> dict[tuple[str, int, str], Verdict]:
    return {(c.quantity, c.update, c.name): c.verdict for c in judgement.checks}


@settings(max_examples=15)
@given(cases(precisions=SHARP), st.sampled_from(CUTS), st.randoms(), st.booleans())
def test_the_order_of_observations_does_not_matter(case: Case, cut: Any, rng: random.Random, wrong: bool) -> None:
    values = values_of(case)
    if wrong:
        chosen = next(v for v in values if v.kind == "weight")
        values = altered(values, chosen, one_ulp)
    record = place(case, values, cut)
    shuffled = dataclasses.replace(record, observations=rng.sample(record.observations, len(record.observations)))
    a, b = judged(case, record), judged(case, shuffled)
    assert told(a) == told(b)
    assert (a.first is None) == (b.first is None)
    if a.first is not None and b.first is not None:
        assert (a.first.quantity, a.first.update) == (b.first.quantity, b.first.update)


# ------------------------------------------------------------------------------------------ wrong numbers


@dataclass(frozen=True)
class Fault:
    """A change of one whole value on all ranks; quantity: what has to be named; late: at the update before."""

    kind: str
    change: Callable[[np.ndarray], np.ndarray]
    quantity: str
    late: bool = False


def thousandth(array: np.ndarray) -> np.ndarray:
    return array * array.dtype.type(1.001)


def to_nan(array: np.ndarray) -> np.ndarray:
    return at_largest(lambda x: np.nan)(array)


def plus_one(array: np.ndarray) -> np.ndarray:
    return array + 1


FAULTS = {
    "one token too many": Fault("tokens", plus_one, "tokens"),
    "tokens counted in floats": Fault("tokens", lambda a: a.astype(np.float32), "tokens"),
    "loss 1.001 times": Fault("loss", thousandth, "loss"),
    "loss NaN": Fault("loss", to_nan, "loss"),
    "gradient element 1.001 times": Fault("gradient", at_largest(lambda x: x * 1.001), "gradient"),
    "gradient 1.001 times": Fault("gradient", thousandth, "gradient"),
    "gradient negative": Fault("gradient", lambda a: -a, "gradient"),
    "gradient zero": Fault("gradient", np.zeros_like, "gradient"),
    "gradient NaN": Fault("gradient", to_nan, "gradient"),
    "norm 1.001 times": Fault("norm", thousandth, "norm"),
    "norm NaN": Fault("norm", to_nan, "norm"),
    "clip coefficient 1.001 times": Fault("clip", thousandth, "clip coefficient"),
    "learning rate 1 + 1e-12 times": Fault("lr", lambda a: a * (1 + 1e-12), "learning rate"),
    "weight one ulp": Fault("weight", one_ulp, "weight update", late=True),
    "weight NaN": Fault("weight", to_nan, "weight update", late=True),
    "weight of other shape": Fault("weight", lambda a: np.append(a.ravel(), a.ravel()[:1]), "weight update", late=True),
    "weight in another dtype": Fault("weight", lambda a: a.astype(np.float16), "weight update", late=True),
    "state one ulp": Fault("state", one_ulp, "optimizer state", late=True),
    "state NaN": Fault("state", to_nan, "optimizer state", late=True),
    "buffer 1.001 times": Fault("buffer", thousandth, "buffer", late=True),
    "step plus one": Fault("step", plus_one, "step"),
    "cursor plus one": Fault("cursor", plus_one, "cursor"),
    "random state plus one": Fault("random_state", plus_one, "random state"),
    "loss scale doubled": Fault("loss_scale", lambda a: a * 2, "loss scale"),
}


def expected_first(fault: Fault, value: Value) -> tuple[str, int]:
    """The quantity to be named, and its update. Weights entering the first update follow from nothing."""
    if fault.late and value.update > 0:
        return fault.quantity, value.update - 1
    return ("initial weights" if fault.kind == "weight" else fault.quantity), value.update


def names_first(judgement: Judgement, quantity: str, update: int) -> bool:
    first = judgement.first
    return first is not None and (first.verdict, first.quantity, first.update) == (Verdict.FAIL, quantity, update)


@pytest.mark.parametrize("name", FAULTS)
def test_one_wrong_value_is_named_at_every_update(name: str) -> None:
    fault, case = FAULTS[name], plain()
    values = values_of(case)
    for update in range(case.updates + 1):
        chosen = [v for v in values if v.kind == fault.kind and v.update == update]
        value = max(chosen, key=lambda v: float(np.abs(v.array).sum()), default=None)
        if value is not None and not (fault.kind == "buffer" and update == 0):
            judgement = judged(case, place(case, altered(values, value, fault.change)))
            assert names_first(judgement, *expected_first(fault, value)), judgement.first


@settings(max_examples=120)
@given(cases(precisions=SHARP), st.sampled_from(sorted(FAULTS)), st.sampled_from(CUTS), st.data())
def test_one_wrong_value_is_named_first_in_any_case(case: Case, name: str, cut: Any, data: st.DataObject) -> None:
    """The value with the largest norm of its kind, so that the error stands above the rounding of the tensor."""
    fault, values = FAULTS[name], values_of(case)
    chosen = [v for v in values if v.kind == fault.kind and not (fault.kind == "buffer" and v.update == 0)]
    if fault.kind in ("norm", "clip") and case.optimizer.clip is None:
        chosen = []
    assume(chosen)
    update = data.draw(st.sampled_from(sorted({v.update for v in chosen})))
    value = max((v for v in chosen if v.update == update), key=lambda v: float(np.abs(v.array).sum()))
    assume(np.abs(value.array).sum() > 0 or fault.change in (one_ulp, plus_one, to_nan))
    correct = judged(case, place(case, values, cut))
    assume(not any(c.verdict is Verdict.INCONCLUSIVE and c.quantity in ("loss", "gradient") for c in correct.checks))
    judgement = judged(case, place(case, altered(values, value, fault.change), cut))
    assert names_first(judgement, *expected_first(fault, value)), judgement.first


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.999, 1.001, 2.0, 4.0, -1.0])
@pytest.mark.parametrize("cut", CUTS)
def test_a_factor_on_all_gradients_is_named_though_adam_and_clipping_mask_it(factor: float, cut: Any) -> None:
    """What follows from the gradients (norm, coefficient, weights) agrees with them: only the gradients are wrong."""
    case = plain()
    values = values_of(case)
    for gradient in [v for v in values if v.kind == "gradient"]:
        values = altered(values, gradient, lambda a: a * np.float32(factor))
    assert names_first(judged(case, place(case, values, cut)), "gradient", 0)


# ------------------------------------------------------------------------------------- one rank, one part

QUANTITY_OF = {
    "inputs": "samples",
    "tokens": "tokens",
    "loss": "loss",
    "gradient": "gradient",
    "norm": "norm",
    "clip": "clip coefficient",
    "lr": "learning rate",
    "weight": "weight update",
    "state": "optimizer state",
    "buffer": "buffer",
    "step": "step",
    "cursor": "cursor",
    "random_state": "random state",
    "loss_scale": "loss scale",
}


def blamed(o: Observation) -> tuple[str, int]:
    quantity, late = QUANTITY_OF[o.kind], o.kind in ("weight", "state", "buffer")
    if o.kind == "weight" and o.update == 0:
        return "initial weights", 0
    return quantity, o.update - late


def shown_by(record: Record, kind: str, update: int, rank: int) -> Observation:
    """The largest part of a kind that a rank shows."""
    parts = [o for o in record.of(kind) if o.update == update and o.rank == rank]
    return max(parts, key=lambda o: o.array.size)


SCALARS = ["norm", "clip", "lr", "step", "cursor", "random_state", "loss_scale"]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", ["gradient", "weight", "state", "buffer", *SCALARS])
def test_one_copy_that_differs_is_named(kind: str, rank: int) -> None:
    """By one ulp, on the first or the last rank."""
    case = plain()
    record = record_of(case)
    chosen = shown_by(record, kind, 1, rank)
    change = one_ulp if chosen.array.dtype.kind == "f" else plus_one
    judgement = judged(case, with_part(record, chosen, changed(chosen, change)))
    assert names_first(judgement, *blamed(chosen)), judgement.first
    assert "ranks disagree" in judgement.first.detail


@pytest.mark.parametrize("update", [0, 1])
@pytest.mark.parametrize("cut", ["flat", "box"])
@pytest.mark.parametrize("kind", ["weight", "gradient", "state"])
@pytest.mark.parametrize("how", ["missing", "twice"])
def test_a_part_that_is_missing_or_shown_twice_is_named(how: str, kind: str, cut: Any, update: int) -> None:
    case = plain()
    record = record_of(case, cut)
    chosen = shown_by(record, kind, max(update, kind == "state"), 1)
    faulty = with_part(record, chosen, *(() if how == "missing" else (chosen, chosen)))
    judgement = judged(case, faulty)
    assert names_first(judgement, *blamed(chosen)), judgement.first
    assert ("shown by no rank" if how == "missing" else "shown more than once") in judgement.first.detail


@pytest.mark.parametrize("cut", ["flat", "box"])
def test_hsdp_copies_of_shards_are_compared(cut: Any) -> None:
    case = plain(layout=Layout(4, replicate=2))
    record = record_of(case, cut)
    assert judged(case, record).verdict is Verdict.PASS
    chosen = shown_by(record, "weight", 1, 3)
    assert names_first(judged(case, with_part(record, chosen, changed(chosen, one_ulp))), "weight update", 0)


@pytest.mark.parametrize("update", [0, 1])
@pytest.mark.parametrize("kind", sorted(QUANTITY_OF))
def test_what_no_rank_shows_is_named(kind: str, update: int) -> None:
    """One tensor of a kind that the strategy promises, on all ranks."""
    case = plain()
    record = record_of(case)
    update = max(update, kind in ("state", "buffer"))
    chosen = shown_by(record, kind, update, 1)
    left = [o for o in record.observations if (o.kind, o.name, o.update) != (kind, chosen.name, update)]
    judgement = judged(case, dataclasses.replace(record, observations=left))
    assert names_first(judgement, *blamed(chosen)), judgement.first


@pytest.mark.parametrize("kind", ["loss", "tokens", *SCALARS])
def test_a_number_of_more_than_one_element_is_a_failure_and_no_crash(kind: str) -> None:
    case = plain()
    values = values_of(case)
    chosen = next(v for v in values if v.kind == kind)
    judgement = judged(case, place(case, altered(values, chosen, lambda a: np.stack([a, a]))))
    assert names_first(judgement, QUANTITY_OF[kind], 0)


def test_a_rank_without_its_part_of_the_loss_is_named() -> None:
    case = plain()
    record = record_of(case)
    chosen = shown_by(record, "loss", 0, 2)
    assert names_first(judged(case, with_part(record, chosen)), "loss", 0)
    other = shown_by(record, "loss", 0, 3)
    assert names_first(judged(case, with_part(record, chosen, other)), "loss", 0)


def no_longer(o: Observation) -> Observation:
    """Another sample in the first row: its lowest bit, or its lowest digit, is another one."""
    array = o.array.copy()
    first = array.reshape(-1)[:1]
    first[:] = (first + 1) % 13 if array.dtype.kind == "i" else 1 - first
    return dataclasses.replace(o, array=array)


@pytest.mark.parametrize("family", ["linear", "gpt"])
@pytest.mark.parametrize("how", ["dropped", "twice", "other sample", "rows lost"])
def test_samples_that_are_not_those_of_the_window_are_named(how: str, family: Any) -> None:
    case = plain(model=Model(family, depth=1), optimizer=Optimizer())
    record = record_of(case)
    chosen = next(o for o in record.of("inputs") if o.update == 0 and len(o.array) == 2)
    half = dataclasses.replace(chosen, array=chosen.array[:1])
    parts = {"dropped": (), "twice": (chosen, chosen), "other sample": (no_longer(chosen),), "rows lost": (half,)}
    judgement = judged(case, with_part(record, chosen, *parts[how]))
    assert names_first(judgement, "samples", 0)
    assert ("[0" in judgement.first.detail) or ("[1]" in judgement.first.detail)


def test_all_ranks_fed_the_same_is_named() -> None:
    case = plain(model=Model("linear"), optimizer=Optimizer())
    record = record_of(case)
    first = next(o for o in record.of("inputs") if o.update == 0)
    for o in [o for o in record.of("inputs") if o.update == 0]:
        record = with_part(record, o, dataclasses.replace(first, rank=o.rank))
    judgement = judged(case, record)
    assert names_first(judgement, "samples", 0) and "fed too often" in judgement.first.detail


def test_a_gradient_that_should_be_absent_is_named_and_one_that_is_lost_too() -> None:
    """None is not zero: decay and moments act on the second only."""
    case = plain(model=Model("mlp", features=("unused",)))
    values = values_of(case)
    weight = next(v for v in values if v.name == "unused.weight")
    zero = dataclasses.replace(weight, kind="gradient", array=np.zeros_like(weight.array))
    judgement = judged(case, place(case, [*values, zero]))
    assert names_first(judgement, "gradient", 0) and "None is not zero" in judgement.first.detail
    lost = [v for v in values if not (v.kind == "gradient" and v.name == "layers.0.weight")]
    judgement = judged(case, place(case, lost))
    assert names_first(judgement, "gradient", 0) and judgement.first.detail.startswith("absent")


def test_an_update_of_a_skipped_window_is_named() -> None:
    """An empty window changes nothing, not even by decay."""
    windows = (plain().windows[0], (((0,),), ((),), (), ((0, 0),)), plain().windows[1])
    case = plain(windows=windows)
    values = values_of(case)
    assert judged(case, place(case, values)).verdict is Verdict.PASS
    for kind, quantity in (("weight", "weight update"), ("state", "optimizer state")):
        chosen = next(v for v in values if v.kind == kind and v.update == 2 and v.array.size > 1)
        assert names_first(judged(case, place(case, altered(values, chosen, one_ulp))), quantity, 1)
    stepped = next(v for v in values if v.kind == "step" and v.update == 2)
    assert names_first(judged(case, place(case, altered(values, stepped, plus_one))), "step", 2)


def test_a_clip_that_no_update_reaches_is_vacuous() -> None:
    case = plain(optimizer=Optimizer(clip=1e6))
    assert names_first(judged(case, record_of(case)), "vacuity", case.updates - 1)


def test_an_update_that_moves_nothing_is_vacuous() -> None:
    case = plain(optimizer=Optimizer(lr=2.0**-60))
    assert names_first(judged(case, record_of(case)), "vacuity", case.updates - 1)


def test_checks_stop_at_the_update_that_failed() -> None:
    case = plain()
    values = values_of(case)
    chosen = next(v for v in values if v.kind == "gradient")
    checks = judged(case, place(case, altered(values, chosen, lambda a: a * 2))).checks
    assert {c.update for c in checks} == {0} and "trajectory" not in {c.quantity for c in checks}


def test_only_promised_kinds_may_not_be_missing() -> None:
    """A framework that cannot show a kind is judged by the others."""
    case = plain()
    few = dataclasses.replace(STRATEGY, observes=frozenset({"inputs", "loss", "gradient", "weight"}))
    left = [o for o in record_of(case).observations if o.kind in few.observes]
    judgement = judge(case, few, Record(4, "cpu", left), accepted(case))
    assert judgement.verdict is Verdict.PASS
    assert {"gradient", "weight update", "trajectory"} <= {c.quantity for c in judgement.checks}
    chosen = next(o for o in left if o.kind == "weight" and o.update == 2 and o.rank == 0)
    wrong = with_part(Record(4, "cpu", left), chosen, changed(chosen, one_ulp))
    assert names_first(judge(case, few, wrong, accepted(case)), "weight update", 1)


def test_a_weight_that_no_rank_shows_is_named_though_it_was_not_promised() -> None:
    """Without it nothing of the update can be judged, and an update that was not judged may not pass."""
    case = plain(windows=plain().windows[:1])
    silent = dataclasses.replace(STRATEGY, observes=frozenset({"inputs", "loss", "gradient"}))
    left = [o for o in record_of(case).observations if (o.kind, o.name) != ("weight", "layers.1.weight")]
    judgement = judge(case, silent, Record(4, "cpu", left), accepted(case))
    assert names_first(judgement, "weight update", 0) and judgement.first.name == "layers.1.weight"


# ---------------------------------------------------------------------------------------------- tolerances


def exact_case(dp: int = 4) -> Case:
    return Case("exact", DYADIC, POWERS, Layout(dp), Optimizer(lr=0.25), accumulation=2)


@pytest.mark.parametrize("cut", CUTS)
def test_the_exact_lane_has_tolerance_zero(cut: Any) -> None:
    case = exact_case()
    values = values_of(case)
    judgement = judged(case, place(case, values, cut))
    assert judgement.verdict is Verdict.PASS and set(judgement.worst().values()) == {0.0}
    for chosen in values:
        if chosen.kind in ("loss", "gradient", "weight") and chosen.array.any():
            wrong = altered(values, chosen, one_ulp)
            assert judged(case, place(case, wrong, cut)).verdict is Verdict.FAIL, chosen.name
            assert judged(case, place(case, wrong, cut), threshold=1e9).verdict is Verdict.FAIL, chosen.name


NORMS = st.floats(1e-12, 1e6)


@given(NORMS, NORMS, st.floats(0, 1e6), st.floats(1, 100))
def test_inconclusive_if_and_only_if_the_radius_nears_the_signal(
    radius: float, signal: float, distance: float, threshold: float
) -> None:
    """Whatever the observed value was. A loosened threshold asks for more distance, a tightened one for no less."""
    found = tolerance.rounded(np.array([distance]), np.array([0.0]), radius, signal, threshold)
    assert (found.verdict is Verdict.INCONCLUSIVE) == (max(8, threshold) * radius >= signal / 4)
    assert found.ratio == pytest.approx(distance / radius, abs=1e-140)


@given(NORMS, st.floats(0, 1e9), st.floats(1, 100))
def test_the_threshold_decides_where_the_case_can_tell(radius: float, distance: float, threshold: float) -> None:
    found = tolerance.rounded(
        np.array([distance]), np.array([0.0]), radius, (4 * max(8, threshold) + 1) * radius, threshold
    )
    assert (found.verdict is Verdict.PASS) == (found.ratio <= threshold)
    assert found.ratio == pytest.approx(distance / radius, abs=1e-140)
    assert found.resolution == pytest.approx(threshold / (4 * max(8, threshold) + 1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("radius", [0.0, 1e-9, 1e9])
def test_what_is_not_finite_fails_everywhere(value: float, radius: float) -> None:
    wrong, right = np.array([value]), np.array([1.0])
    assert tolerance.rounded(wrong, right, radius, 1.0, 8.0).verdict is Verdict.FAIL
    assert tolerance.equal(wrong, right).verdict is Verdict.FAIL
    assert tolerance.elementwise(wrong, right, right, 1e-7, False).verdict is Verdict.FAIL


@given(st.integers(-100, 100), st.booleans())
def test_the_update_is_judged_bitwise_or_to_8_units_of_the_weight(ulps: int, bitwise: bool) -> None:
    expected = np.array([1.5, -3.0], dtype=np.float32)
    eps = float(np.finfo(np.float32).eps)
    observed = expected + np.float32(eps) * np.array([ulps, 0], dtype=np.float32)
    found = tolerance.elementwise(observed, expected, expected, eps, bitwise)
    assert found.ratio == pytest.approx(abs(ulps) / 1.5)
    assert (found.verdict is Verdict.PASS) == (ulps == 0 if bitwise else abs(ulps) <= 12)


@pytest.mark.parametrize("factor", [2.0**-21, 2.0**-20, 2.0**-19, 2.0**-18])
def test_the_threshold_given_to_the_judge_is_respected(factor: float) -> None:
    """The same record passes just above its ratio and fails just below."""
    case = plain(optimizer=Optimizer(lr=0.25))
    values = values_of(case)
    chosen = next(v for v in values if v.kind == "gradient")
    record = place(case, altered(values, chosen, lambda a: a * np.float32(1 + factor)))
    checks = judged(case, record, threshold=1e3).checks
    ratio = next(c.ratio for c in checks if c.quantity == "gradient" and c.name == chosen.name and c.update == 0)
    assert ratio > 1
    for threshold, fails in ((ratio * 1.01, False), (ratio * 0.99, True)):
        found = judged(case, record, threshold=threshold)
        first = found.first
        assert (first is not None and first.quantity == "gradient") == fails


def test_torchs_arithmetic_is_bitwise_on_the_cpu_alone() -> None:
    """One ulp of a weight fails where the bits are known; elsewhere 8 units of the weight are allowed."""
    case = plain()
    record = record_of(case)
    chosen = [o for o in record.of("weight") if o.update == 1 and o.name == "layers.0.weight"]
    for o in chosen:
        record = with_part(record, o, changed(o, one_ulp))
    expectation = accepted(case)
    own = dataclasses.replace(STRATEGY, arithmetic="own")
    for strategy, device, quantity in (
        (STRATEGY, "cpu", "weight update"),
        (own, "cpu", None),
        (STRATEGY, "cuda", None),
    ):
        judgement = judge(case, strategy, dataclasses.replace(record, device=device), expectation)
        first = [c.quantity for c in judgement.checks if c.verdict is Verdict.FAIL and c.update == 0][:1]
        assert first == ([quantity] if quantity else [])


def test_the_first_check_is_the_earliest_then_the_worst() -> None:
    checks = [
        Check("weight update", 0, "a", Verdict.FAIL, 9.0),
        Check("vacuity", 0, "a", Verdict.FAIL, np.inf),
        Check("loss", 1, "a", Verdict.FAIL, np.inf),
        Check("gradient", 0, "a", Verdict.FAIL, 9.0),
        Check("gradient", 0, "b", Verdict.FAIL, 99.0),
        Check("tokens", 0, "a", Verdict.INCONCLUSIVE, np.inf),
        Check("samples", 0, "a", Verdict.PASS),
    ]
    judgement = Judgement(checks)
    assert judgement.verdict is Verdict.FAIL and judgement.first is checks[4]
    assert Judgement(checks[5:]).verdict is Verdict.INCONCLUSIVE and Judgement(checks[5:]).first is checks[5]
    assert Judgement(checks[6:]).verdict is Verdict.PASS and Judgement(checks[6:]).first is None


# ------------------------------------------------------------------------------------------------- restore


def view_of(case: Case, record: Record) -> View:
    return View(case, STRATEGY, record, accepted(case))


def view_after(case: Case, record: Record) -> View:
    """The view of a restored run."""
    return view_of(case, going_on(record))


def after_restore(case: Case, record: Record, first: int | None = None) -> Record:
    """What a run shows that was loaded from the checkpoint of the middle."""
    start = case.save_after if first is None else first
    return dataclasses.replace(record, observations=[o for o in record.observations if o.update >= start])


def restored(case: Case, cut: Any, change: Callable[[Record], Record]) -> Judgement:
    record = record_of(case, cut)
    return judge_restored(view_of(case, record), view_after(case, change(after_restore(case, record))))


RESTORED = {
    "restored weights": ("weight", one_ulp),
    "restored optimizer state": ("state", one_ulp),
    "restored buffers": ("buffer", one_ulp),
    "restored random state": ("random_state", plus_one),
    "restored loss scale": ("loss_scale", lambda a: a * 2),
    "restored schedule": ("lr", lambda a: a * 2),
    "restored step": ("step", plus_one),
    "restored cursor": ("cursor", plus_one),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_that_goes_on_as_if_nothing_had_happened_passes(cut: Any) -> None:
    judgement = restored(plain(), cut, lambda record: record)
    assert judgement.verdict is Verdict.PASS
    assert {*RESTORED, "restored layout"} <= {c.quantity for c in judgement.checks}
    assert {c.update for c in judgement.checks if not c.quantity.startswith("restored")} <= {1, 2}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("quantity", RESTORED)
def test_each_state_that_did_not_survive_is_named(quantity: str, cut: Any) -> None:
    kind, change = RESTORED[quantity]
    case = plain()

    def everywhere(record: Record) -> Record:
        for o in [o for o in record.of(kind) if o.update == case.save_after and o.array.size]:
            record = with_part(record, o, changed(o, change))
        return record

    judgement = restored(case, cut, everywhere)
    assert names_first(judgement, quantity, case.save_after), judgement.first


@pytest.mark.parametrize("kind", ["weight", "state", "buffer"])
def test_a_state_that_is_lost_is_named(kind: str) -> None:
    case = plain()
    quantity = next(q for q, (k, _) in RESTORED.items() if k == kind)
    judgement = restored(
        case,
        "whole",
        lambda r: dataclasses.replace(
            r, observations=[o for o in r.observations if (o.kind, o.update) != (kind, 1) or "0.bias" in o.name]
        ),
    )
    first = judgement.first
    assert first is not None and first.verdict is Verdict.FAIL
    assert first.quantity in (quantity, "restored layout") and first.update == 1


@pytest.mark.parametrize("first", [0, 2])
def test_a_run_that_goes_on_elsewhere_is_named(first: int) -> None:
    """Windows trained on twice, or left out."""
    case = plain(windows=plain().windows * 2)
    assert case.save_after == 2
    record = record_of(case)
    start = {0: 0, 2: 3}[first]
    judgement = judge_restored(view_of(case, record), view_after(case, after_restore(case, record, start)))
    assert names_first(judgement, "restored cursor", 2)
    assert f"goes on at window {start}, but 2 windows were consumed" in judgement.first.detail


@pytest.mark.parametrize("cut", ["flat", "box"])
def test_shards_that_came_back_on_other_ranks_are_named(cut: Any) -> None:
    """Every rank loads the shard of the next one; places are as they were."""
    case = plain(model=Model("linear", inputs=4, outputs=4), optimizer=Optimizer("adam", lr=2.0**-6, eps=2.0**-12))
    record = record_of(case, cut)
    sharded = {(o.kind, o.name, o.rank): o for kind in ("weight", "state") for o in record.of(kind) if o.update == 1}

    def rotated(o: Observation) -> Observation:
        other = sharded.get((o.kind, o.name, (o.rank + 1) % 4)) if o.update == 1 else None
        return o if other is None else dataclasses.replace(o, array=other.array)

    found = restored(case, cut, lambda r: dataclasses.replace(r, observations=[rotated(o) for o in r.observations]))
    assert names_first(found, "restored layout", 1), found.first
    assert "held before saving" in found.first.detail


def test_another_cut_after_loading_is_named() -> None:
    case = plain()
    whole, other = record_of(case, "flat"), after_restore(case, record_of(case, "box"))
    judgement = judge_restored(view_of(case, whole), view_after(case, other))
    assert names_first(judgement, "restored layout", 1) and "cut otherwise" in judgement.first.detail
