"""The exactness proof says what it should: proven cases give equal bits in every order, others are refused."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equivtests.cases.case import (
    DOUBLE,
    FEATURES,
    Case,
    Layout,
    LossScale,
    Model,
    Optimizer,
    Precision,
    Semantics,
    Windows,
)
from equivtests.cases.parameters import decays, initial, parameters
from equivtests.cases.windows import window_of
from equivtests.reference.exact import FORMATS, Arithmetic, lowest, prove

BFLOAT16 = Precision("float32", "bfloat16", "float32")
Family = Literal["chain", "linear", "mlp"]
FAMILIES: tuple[Family, ...] = ("chain", "linear", "mlp")
HALF_WIRE = Precision(reduce="float16")
INEXACT = ("batch_norm", "dropout", "pairs", "running")


def windows(updates: int, ranks: int, micros: int = 2, rows: int = 2, tokens: int = 2) -> Windows:
    return (((((tokens,) * rows,) * micros),) * ranks,) * updates


def dyadic(
    family: Family = "mlp", updates: int = 1, ranks: int = 2, features: tuple[str, ...] = (), **changes: Any
) -> Case:
    model = Model(family, width=4, depth=2, features=features, numbers="dyadic")
    case = Case("exact", model, windows(updates, ranks), Layout(ranks), accumulation=2)
    return case.replace(**changes)


# ------------------------------------------------------------------- an independent computation, with torch


def positions(case: Case, update: int) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """(inputs, targets, 1.0 if conditional) of each valid position of a window."""
    micros = [m for rank in range(case.layout.dp) for m in window_of(case, update, rank).microbatches]
    return [(m.inputs[n, t], m.targets[n, t], float(m.conditional)) for m in micros for n, t in np.argwhere(m.valid)]


def in_any_order(terms: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Sum over the last axis, one rounded addition after the other, in a random order."""
    total = torch.zeros_like(terms[..., 0])
    for k in rng.permutation(terms.shape[-1]):
        total = total + terms[..., k]
    return total


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rng: np.random.Generator) -> torch.Tensor:
    terms = x[:, None, :] * weight[None]
    if bias is not None:
        terms = torch.cat([terms, bias[None, :, None].expand(len(x), -1, 1)], -1)
    return in_any_order(terms, rng)


def outputs(case: Case, w: dict[str, torch.Tensor], x: torch.Tensor, branch: torch.Tensor, rng) -> torch.Tensor:
    model = case.model
    if model.family == "chain":
        return math.prod((w[f"factors.{i}"] for i in range(model.depth)), start=x)
    if model.family == "linear":
        return layer(x, w["linear.weight"], w.get("linear.bias"), rng)
    hidden = x
    for i in range(model.depth):
        hidden = layer(torch.relu(hidden) if i else x, w[f"layers.{i}.weight"], w.get(f"layers.{i}.bias"), rng)
    return hidden + layer(x, w["branch.weight"], None, rng) * branch if model.has("conditional") else hidden


def backward(case: Case, w: dict[str, torch.Tensor], update: int, rng: np.random.Generator) -> float:
    """Gradients accumulated over random groups of positions, visited in random order."""
    dtype = getattr(torch, case.precision.compute)
    listed, total = positions(case, update), torch.zeros((), dtype=dtype)
    order = rng.permutation(len(listed))
    for group in np.split(order, np.sort(rng.integers(0, len(listed), 3))):
        if len(group):
            x, t, branch = (torch.tensor(np.stack([listed[i][k] for i in group])).to(dtype) for k in range(3))
            error = outputs(case, w, x, branch[:, None], rng) - t
            part = in_any_order((error * error).ravel(), rng) * 0.5 * case.magnitude / case.tokens(update)
            part.backward()
            total = total + part.detach()
    return float(total)


def values(w: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {n: p.detach().to(torch.float64).numpy().copy() for n, p in w.items()}


def train(case: Case, shuffle: int) -> tuple[list[float], list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """Losses, gradients and weights of the case in its own precision, summed in an order drawn from `shuffle`."""
    rng, optimizer = np.random.default_rng(shuffle), case.optimizer
    trained = {p.name for p in parameters(case.model) if p.trained}
    dtype = getattr(torch, case.precision.compute)
    w = {n: torch.tensor(v).to(dtype).requires_grad_(n in trained) for n, v in initial(case).items()}
    momentum = optimizer.momentum if optimizer.name == "momentum" else 0.0
    groups = [
        {"params": [p], "weight_decay": optimizer.weight_decay if decays(case, n) else 0.0}
        for n, p in w.items()
        if n in trained
    ]
    sgd = torch.optim.SGD(groups, lr=optimizer.lr, momentum=momentum, foreach=False)
    losses, gradients, weights = [], [], [values(w)]
    for update in (u for u in range(case.updates) if case.tokens(u)):
        sgd.zero_grad(set_to_none=True)
        losses.append(backward(case, w, update, rng))
        gradients.append({n: p.grad.to(torch.float64).numpy() for n, p in w.items() if p.grad is not None})
        sgd.step()
        weights.append(values(w))
    return losses, gradients, weights


def same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> bool:
    return all(set(x) == set(y) and all(np.array_equal(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------ proven cases


def test_agrees_with_fractions_worked_by_hand() -> None:
    """One position, two factors, two updates: every formula written out once, in rational arithmetic."""
    case = Case("hand", Model("chain", depth=2, numbers="dyadic"), (((((1,),),)), ((((1,),),))), Layout(1), seed=0)
    a, b = (Fraction(float(v[0])) for v in initial(case).values())
    proof = prove(case)
    assert proof.holds and proof.bits == 24
    for update in range(2):
        ((inputs, targets, _),) = positions(case, update)
        x, t = Fraction(float(inputs[0])), Fraction(float(targets[0]))
        error = x * a * b - t
        assert proof.loss[update] == error**2 / 2
        assert proof.gradients[update]["factors.0"][0] == error * b * x
        assert proof.gradients[update]["factors.1"][0] == error * a * x
        a, b = a - Fraction(1, 8) * error * b * x, b - Fraction(1, 8) * error * a * x
        assert (proof.weights[update + 1]["factors.0"][0], proof.weights[update + 1]["factors.1"][0]) == (a, b)


@st.composite
def cases(draw: st.DrawFn, precisions: tuple[Precision, ...]) -> Case:
    """Dyadic cases of all families, features and optimizers that the exact lane has; token totals are powers of two."""
    family = draw(st.sampled_from(FAMILIES))
    usable = [f for f, families in FEATURES.items() if family in families and f not in INEXACT]
    features = tuple(sorted(draw(st.sets(st.sampled_from(usable))) if usable else ()))
    model = Model(
        family,
        width=draw(st.integers(1, 5)),
        depth=draw(st.integers(1 + ("frozen" in features), 3)),
        features=features,
        numbers="dyadic",
    )
    ranks = draw(st.sampled_from([1, 2, 4]))
    shape = (draw(st.integers(1, 2)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4])))
    plain = windows(draw(st.integers(1, 3)), ranks, *shape)
    decay = draw(st.sampled_from([0.0, 0.0625]))
    optimizer = Optimizer(
        draw(st.sampled_from(["sgd", "momentum"])),
        lr=draw(st.sampled_from([0.125, 0.5])),
        momentum=0.5,
        weight_decay=decay,
        decay_vectors=draw(st.booleans()),
    )
    case = Case("drawn", model, plain, Layout(ranks), optimizer, draw(st.sampled_from(precisions)), accumulation=2)
    return case.replace(seed=draw(st.integers(0, 99)), magnitude=draw(st.sampled_from([0.25, 1.0, 8.0])))


@settings(max_examples=60, deadline=None)
@given(cases((DOUBLE, Precision())), st.integers(0, 2**32))
def test_a_proven_case_gives_the_same_bits_in_every_order(case: Case, shuffle: int) -> None:
    """The central promise: losses, gradients and weights of all updates, whatever the grouping and the order."""
    proof = prove(case)
    assume(proof.holds)
    losses, gradients, weights = train(case, shuffle)
    assert losses == proof.loss
    assert same(gradients, proof.gradients)
    assert same(weights, proof.weights)


@settings(max_examples=30, deadline=None)
@given(cases((BFLOAT16,)), st.integers(0, 2**32))
def test_a_case_proven_in_eight_bits_gives_the_same_gradients_in_bfloat16(case: Case, shuffle: int) -> None:
    case = case.replace(windows=case.windows[:1])
    proof = prove(case)
    assume(proof.holds)
    losses, gradients, _ = train(case, shuffle)
    assert losses == proof.loss
    assert same(gradients, proof.gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_shuffled_sums_part_where_the_proof_fails_and_agree_where_it_holds(family: Family) -> None:
    """The proof separates: dyadic numbers agree in float32 under eight orders; real ones do not."""
    exact = dyadic(family)
    inexact = exact.replace(model=Model(family, width=4, depth=2))
    assert prove(exact).holds and not prove(inexact).holds
    first, *others = (train(exact, shuffle)[1] for shuffle in range(8))
    assert all(same(first, other) for other in others)
    first, *others = (train(inexact, shuffle)[1] for shuffle in range(8))
    assert not all(same(first, other) for other in others)


def test_bits_needed_are_counted_from_the_terms() -> None:
    """The errors of a linear model in ternary numbers are integers, some of them odd: Σ e²/2 has the quantum 1/2."""
    case = dyadic("linear")
    weight = initial(case)["linear.weight"]
    errors = np.array([weight @ inputs - targets for inputs, targets, _ in positions(case, 0)])
    proof = prove(case)
    assert np.any(errors % 2 == 1) and proof.where == "update 0, loss"
    assert proof.needed == pytest.approx(math.log2((errors**2).sum()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [Precision(), DOUBLE, HALF_WIRE], ids=lambda p: p.label)
def test_one_update_of_a_small_case_holds(family: Family, precision: Precision) -> None:
    """Not vacuous: most gradients are not zero."""
    proof = prove(dyadic(family, precision=precision))
    assert proof.holds, proof
    values = np.concatenate([g.ravel() for g in proof.gradients[0].values()])
    assert np.count_nonzero(values) >= len(values) / 3


def test_a_window_without_valid_tokens_changes_nothing() -> None:
    """A skipped window leaves weights, momentum and the schedule where they were."""
    full, empty = windows(2, 2), windows(1, 2, tokens=0)
    optimizer = Optimizer("momentum", momentum=0.5, schedule=(1.0, 0.5))
    plain = dyadic("linear", windows=full, optimizer=optimizer, precision=DOUBLE)
    skipping = plain.replace(windows=(full[0], empty[0], full[1]))
    proof = prove(skipping)
    assert proof.holds and proof.gradients[1] == {} and proof.loss[1] == 0.0
    assert same([proof.weights[1]], [proof.weights[2]])
    _, gradients, weights = train(skipping.replace(optimizer=Optimizer("momentum", momentum=0.5)), 0)
    constant = prove(skipping.replace(optimizer=Optimizer("momentum", momentum=0.5)))
    assert same([constant.gradients[0], constant.gradients[2]], gradients)
    assert same([constant.weights[0], constant.weights[1], constant.weights[3]], weights)
    moved = {n: proof.weights[3][n] - proof.weights[2][n] for n in proof.weights[0]}
    assert all(np.array_equal(2 * moved[n], constant.weights[3][n] - constant.weights[2][n]) for n in moved)


def test_absent_gradients_are_absent() -> None:
    """A frozen or untouched parameter has no gradient, so that neither decay nor momentum moves it."""
    optimizer = Optimizer("momentum", momentum=0.5, weight_decay=0.125)
    case = dyadic(features=("conditional", "frozen", "unused"), optimizer=optimizer)
    proof = prove(case)
    assert set(proof.gradients[0]) == {"layers.1.weight", "branch.weight"}
    for name in ("unused.weight", "layers.0.weight"):
        assert np.array_equal(proof.weights[0][name], proof.weights[1][name])
    second_only = case.replace(windows=((((), (2, 2)), ((), (2, 2))),))
    assert set(prove(second_only).gradients[0]) == {"layers.1.weight"}


# --------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("family", FAMILIES)
def test_many_updates_need_more_bits_than_float32_has(family: Family) -> None:
    proof = prove(dyadic(family, updates=5, optimizer=Optimizer(lr=0.25)))
    assert not proof.holds
    assert proof.needed >= proof.bits == 24
    assert proof.where.startswith(f"update {len(proof.loss) - 1}, ")


def test_more_bits_hold_longer() -> None:
    """Two updates of a linear model fit float64, and not eight bits."""
    case = dyadic("linear", updates=2)
    assert prove(case.replace(precision=DOUBLE)).holds
    proof = prove(case.replace(precision=BFLOAT16))
    assert not proof.holds and proof.bits == 8


def test_a_narrow_wire_is_counted_apart() -> None:
    """Gradients computed in float32 may not fit the dtype they are reduced in."""
    case = dyadic("linear", updates=2)
    assert prove(case).holds
    proof = prove(case.replace(precision=Precision(reduce="bfloat16")))
    assert not proof.holds and proof.bits == 8 and proof.where.endswith("on the wire")


REFUSED = {
    "update 0: token total 6 is not a power of two": dyadic(windows=windows(1, 2, micros=1, rows=1, tokens=3)),
    "world size 3 is not a power of two": dyadic(ranks=3),
    "clipping": dyadic(optimizer=Optimizer(clip=1.0)),
    "optimizer adam": dyadic(optimizer=Optimizer("adam")),
    "optimizer adamw": dyadic(optimizer=Optimizer("adamw")),
    "feature batch_norm": dyadic(features=("batch_norm",)),
    "feature dropout": dyadic(features=("dropout",)),
    "feature pairs": dyadic(features=("pairs",)),
    "feature running": dyadic(features=("running",)),
    "loss scaling": dyadic(precision=Precision(loss_scale=LossScale())),
    "semantics denominator = rank": dyadic(semantics=Semantics(denominator="rank")),
    "model gpt": Case("gpt", Model("gpt"), windows(1, 1), Layout(1), accumulation=2),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_exact_by_nature_is_refused_with_the_reason(reason: str) -> None:
    proof = prove(REFUSED[reason])
    assert not proof.holds and proof.needed == math.inf
    assert proof.where.startswith(reason)


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(lr=0.1),
        Optimizer(schedule=(0.3,)),
        Optimizer("momentum", momentum=0.9),
        Optimizer(weight_decay=0.01),
    ],
    ids=["lr", "schedule", "momentum", "decay"],
)
def test_hyperparameters_that_are_not_dyadic_do_not_hold(optimizer: Optimizer) -> None:
    assert not prove(dyadic("linear", updates=2, optimizer=optimizer)).holds


def test_values_outside_the_exponent_range_do_not_hold() -> None:
    """The bits would suffice: magnitude moves exponents only."""
    assert prove(dyadic("linear", magnitude=2.0**-60, optimizer=Optimizer(lr=2.0**57))).holds
    proof = prove(dyadic("linear", magnitude=2.0**-120, optimizer=Optimizer(lr=2.0**117)))
    assert not proof.holds and proof.where.endswith("exponent out of range")


# ------------------------------------------------------------------------------------------ the criterion


def test_agreement_in_one_order_is_not_taken_for_exactness() -> None:
    """2^25 - 2^25 + 1 is exact from the left and wrong from the right."""
    terms, arithmetic = np.array([2.0**25, -(2.0**25), 1.0]), Arithmetic()
    assert sum(terms.astype(np.float32)) == 1.0 != sum(terms[::-1].astype(np.float32))
    assert arithmetic.reduce("sum", terms, lowest(terms), FORMATS["float32"]) == 1.0
    assert not arithmetic.holds and arithmetic.where == "sum"


@pytest.mark.parametrize(("top", "holds"), [(2.0**24 - 2, True), (2.0**24 - 1, False), (2.0**24 + 2, False)])
def test_the_limit_itself(top: float, holds: bool) -> None:
    """Σ|terms| / quantum = 2^24 - 1 is the last to hold."""
    terms, arithmetic = np.array([top, 1.0]) * 2.0**-9, Arithmetic()
    arithmetic.reduce("sum", terms, lowest(terms), FORMATS["float32"])
    assert arithmetic.holds is holds


@settings(deadline=None)
@given(st.lists(st.integers(-(2**22), 2**22), min_size=1, max_size=5), st.integers(-40, 40))
def test_every_order_of_a_sum_that_holds_is_exact_in_float32(integers: list[int], shift: int) -> None:
    terms, arithmetic = np.array(integers) * 2.0**shift, Arithmetic()
    value = arithmetic.reduce("sum", terms, lowest(terms), FORMATS["float32"])
    assume(arithmetic.holds)
    for order in itertools.permutations(terms.astype(np.float32)):
        assert sum(order, start=np.float32(0)) == value


@given(st.integers(-(2**53), 2**53), st.integers(-400, 400))
def test_lowest_bit(integer: int, shift: int) -> None:
    found = int(lowest(np.array([integer * 2.0**shift]))[0])
    assert found == (shift + (integer & -integer).bit_length() - 1 if integer else 4096)
