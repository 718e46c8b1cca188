"""The reference is right: it agrees with the modules, with torch's optimizers, and with numbers worked by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import FAMILIES, SIMPLE_OPTIMIZERS, SINGLE, cases, features_of, optimizers

from equivtests.cases.case import DOUBLE, Case, Layout, Model, Optimizer, Semantics
from equivtests.cases.windows import MicroBatch, decode_ids, window_of
from equivtests.errors import CaseError
from equivtests.models.build import TERM_DENOMINATOR, TERM_WEIGHTS, build
from equivtests.reference import optimizers as reference_optimizers
from equivtests.reference import update as one
from equivtests.reference.expectation import canonical_weights, expect, gradient_unit, split, trajectory
from equivtests.reference.rows import Rows, row_coefficients, rows_of, token_coefficients

PLAIN = Semantics()
DENOMINATORS = ("window", "microbatch", "rank", "rank-microbatch", "rows")
MOST_FEATURES = [(family, (feature,)) for family in FAMILIES for feature in features_of(family)]
ALL_FEATURES: list[tuple[Any, tuple[str, ...]]] = [(family, tuple(features_of(family))) for family in FAMILIES]


def model_of(family: Any, features: tuple[str, ...], **sizes: int) -> Model:
    """A small model; a moe has three experts, two of which take each token, as long as there is room."""
    experts = {"experts": 3, "top_k": 2, "capacity": 5} if family == "moe" else {}
    return Model(family, features=features, **(experts | sizes))


# ------------------------------------------------------------------------------ modules against functions


def by_module(case: Case, update: int, draw: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a window from the torch module, one micro-batch after the other on one device."""
    module, stream = build(case)
    stream.draw = draw
    micros = [m for rank in range(case.layout.dp) for m in window_of(case, update, rank).microbatches]
    totals = {"tokens": sum(m.tokens for m in micros), "rows": sum(m.rows for m in micros)}
    loss = 0.0
    for micro in micros:
        terms = module(*map(torch.from_numpy, (micro.inputs, micro.targets, micro.valid, micro.ids)), micro.conditional)
        value = torch.zeros((), dtype=torch.float64)
        for name, term in terms.items():
            if name == "pairs":
                products = term @ term.T
                term = products.sum() - products.diagonal().sum()
            value = value + TERM_WEIGHTS[name] * term / totals[TERM_DENOMINATOR[name]]
        value = case.magnitude * value
        value.backward()
        loss += float(value.detach())
    return loss, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_agree(case: Case, update: int = 0, draw: int = 0, floor: float = 0.0) -> None:
    """Equal to 1e-12 of each gradient's norm; `floor`: the least norm that counts, as a fraction of the largest."""
    loss, expected = by_module(case, update, draw)
    found = one.gradients(case, PLAIN, update, draw, canonical_weights(case))
    scale = max((float(g.norm()) for g in expected.values()), default=0.0)
    assert math.isclose(found.loss, loss, rel_tol=1e-12)
    assert set(found.values) == set(expected)
    for name, gradient in expected.items():
        assert float((found.values[name] - gradient).norm()) <= 1e-12 * max(float(gradient.norm()), floor * scale), name


@pytest.mark.parametrize(("family", "features"), [*MOST_FEATURES, *ALL_FEATURES])
def test_modules_and_reference_agree(family: Any, features: tuple[str, ...]) -> None:
    """Loss and gradients in float64; absent gradients are absent in both."""
    windows = ((((5, 2), (1,), (0, 0)),), (((3,), (4, 1)),))
    if "pairs" in features:
        windows = ((((5, 2, 1),),), (((3, 4),),))
    case = Case("agree", model_of(family, features, depth=2), windows, Layout(1), precision=DOUBLE, accumulation=3)
    assert_agree(case)
    assert_agree(case, update=1, draw=1)


@settings(max_examples=100)
@given(cases(leave_out=("pairs",), precisions=(DOUBLE,), worlds=(1,), updates=1, used=True, lengths=True))
def test_modules_and_reference_agree_on_any_window(case: Case) -> None:
    assert_agree(case, floor=1.0)


@pytest.mark.parametrize(
    ("family", "features", "absent"),
    [
        ("mlp", ("frozen",), {"layers.0.weight"}),
        ("mlp", ("unused",), {"unused.weight"}),
        ("gpt", ("frozen", "unused"), {"embedding.weight", "unused.weight"}),
        ("moe", ("unused",), {"unused.weight"}),
    ],
)
def test_untouched_parameters_have_no_gradient(family: Any, features: tuple[str, ...], absent: set[str]) -> None:
    case = Case("absent", model_of(family, features), ((((3,),),),), Layout(1), precision=DOUBLE)
    weights = canonical_weights(case)
    assert set(weights) - set(one.gradients(case, PLAIN, 0, 0, weights).values) == absent


@pytest.mark.parametrize(("family", "features"), MOST_FEATURES)
def test_every_feature_changes_something(family: Any, features: tuple[str, ...]) -> None:
    """A feature that both sides ignore would agree, too. (Where the weight is stored changes nothing here.)"""
    windows = ((((5, 2), (3, 1)),),)
    plain, other = (
        Case("switched", model_of(family, f), windows, Layout(1), precision=DOUBLE, accumulation=2)
        for f in ((), features)
    )
    a, b = (one.gradients(c, PLAIN, 0, 0, canonical_weights(c)) for c in (plain, other))
    changed = (
        a.loss != b.loss
        or set(a.values) != set(b.values)
        or set(canonical_weights(plain)) != set(canonical_weights(other))
    )
    stored = not next(build(other)[0].parameters()).is_contiguous()
    assert changed or stored or b.hidden is not None


# --------------------------------------------------------------------------------------------- optimizers


def torch_optimizer(o: Optimizer, weight: torch.Tensor, **options: Any) -> torch.optim.Optimizer:
    if o.name in ("adam", "adamw"):
        kind = torch.optim.Adam if o.name == "adam" else torch.optim.AdamW
        return kind([weight], o.lr, o.betas, o.eps, o.weight_decay, **options)
    return torch.optim.SGD([weight], o.lr, o.momentum, weight_decay=o.weight_decay, **options)


@settings(max_examples=60)
@given(optimizers(), st.sampled_from((torch.float32, torch.float64)), st.booleans(), st.integers(0, 2**31))
def test_optimizers_are_torchs_bit_for_bit(o: Optimizer, dtype: torch.dtype, foreach: bool, seed: int) -> None:
    """Four steps, for-loop and foreach, with a learning rate that changes; weights and state."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 7, generator=rng, dtype=dtype)
    leaf = weight.clone().requires_grad_()
    theirs, state = torch_optimizer(o, leaf, foreach=foreach), {}
    for step in range(4):
        gradient = torch.randn(5, 7, generator=rng, dtype=dtype) * 2.0 ** (-8 * step)
        theirs.param_groups[0]["lr"] = o.rate(step)
        leaf.grad = gradient.clone()
        theirs.step()
        weight, state = reference_optimizers.step(o, o.rate(step), o.weight_decay, weight, gradient, state)
        assert torch.equal(weight, leaf.detach())
        kept = {k: v for k, v in theirs.state[leaf].items() if v is not None}
        assert set(kept) == set(state)
        assert all(torch.equal(kept[key].to(value.dtype), value) for key, value in state.items())


def test_adam_by_hand() -> None:
    """One step from zero moments: m = (1 - b1) g, v = (1 - b2) g², corrected to g and g²; w -= lr g / (|g| + eps)."""
    o = Optimizer("adam", lr=0.5, betas=(0.75, 0.5), eps=1.0)
    weight, state = reference_optimizers.step(o, 0.5, 0.0, torch.tensor([1.0]), torch.tensor([-3.0]), {})
    assert float(weight) == 1.0 + 0.5 * 3 / (3 + 1)
    assert {k: float(v) for k, v in state.items()} == {"step": 1, "exp_avg": -0.75, "exp_avg_sq": 4.5}


def test_coupled_and_decoupled_decay_by_hand() -> None:
    """AdamW shrinks the weight by lr · decay; Adam adds decay · w to the gradient, whose scale it then forgets."""
    weight, gradient = torch.tensor([2.0]), torch.tensor([4.0])
    moved = {
        name: float(reference_optimizers.step(Optimizer(name, eps=0.0), 0.5, 0.5, weight, gradient, {})[0])
        for name in ("sgd", "adam", "adamw")
    }
    assert moved == {"sgd": 2 - 0.5 * (4 + 0.5 * 2), "adam": 2 - 0.5, "adamw": 2 * (1 - 0.25) - 0.5}


@pytest.mark.parametrize(
    ("rule", "vectors", "expected"),
    [
        ("declared", True, (0.5, 0.5)),
        ("declared", False, (0.0, 0.5)),
        ("all", False, (0.5, 0.5)),
        ("none", True, (0.0, 0.0)),
    ],
)
def test_who_decays(rule: str, vectors: bool, expected: tuple[float, float]) -> None:
    o = Optimizer(weight_decay=0.5, decay_vectors=vectors)
    assert tuple(reference_optimizers.decay_of(o, "w", ndim, rule) for ndim in (1, 2)) == expected


# ------------------------------------------------------------------------------------------- denominators


def table(*fed: tuple[int, int, int]) -> Rows:
    """Rows given as (rank, micro-batch, valid tokens)."""
    rank, micro, tokens = (np.array(column) for column in zip(*fed, strict=True))
    micros = tuple(int(micro[rank == r].max()) + 1 for r in range(int(rank.max()) + 1))
    valid = np.arange(8)[None, :] < tokens[:, None]
    zero = np.zeros(len(fed))
    return Rows(zero, zero, valid, np.arange(len(fed)), rank, micro, zero.astype(bool), micros)


def loss_under(span: str, rows: Rows, sums: list[float]) -> float:
    return float(token_coefficients(rows, span) @ np.array(sums))


def test_two_ranks_with_loss_sums_4_and_6_over_2_and_6_tokens() -> None:
    """(4 + 6) / (2 + 6) = 1.25; the mean of the ranks' means (2 and 1) is 1.5."""
    rows = table((0, 0, 2), (1, 0, 6))
    losses = {span: loss_under(span, rows, [4, 6]) for span in DENOMINATORS}
    assert losses == {"window": 1.25, "microbatch": 1.25, "rank": 1.5, "rank-microbatch": 1.5, "rows": 1.5}


def test_each_denominator_by_hand() -> None:
    """Rank 0: micro-batches of 1 + 1 and 2 tokens; rank 1: 4 and 8. The token losses of row i are i."""
    rows = table((0, 0, 1), (0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 8))
    sums = [1 * 1, 2 * 1, 3 * 2, 4 * 4, 5 * 8]
    assert loss_under("window", rows, sums) == 65 / 16
    assert loss_under("microbatch", rows, sums) == pytest.approx((19 / 6 + 46 / 10) / 2)
    assert loss_under("rank", rows, sums) == pytest.approx((9 / 4 + 56 / 12) / 2)
    assert loss_under("rank-microbatch", rows, sums) == pytest.approx((3 / 2 + 3 + 4 + 5) / 4)
    assert loss_under("rows", rows, sums) == pytest.approx((2 * 3 / 2 + 3 + 4 + 5) / 5)


def test_what_has_no_valid_token_contributes_nothing() -> None:
    """Micro-batch 1 of rank 0 and all of rank 1 are empty: they still count as parts of a mean, with value 0."""
    rows = table((0, 0, 4), (0, 1, 0), (1, 0, 0))
    sums = [8, 0, 0]
    losses = {span: loss_under(span, rows, sums) for span in DENOMINATORS}
    assert losses == pytest.approx({"window": 2, "microbatch": 1, "rank": 1, "rank-microbatch": 0.5, "rows": 2 / 3})


@pytest.mark.parametrize("span", DENOMINATORS)
def test_all_denominators_agree_where_everything_is_equal(span: str) -> None:
    """Why equal token counts hide the mistake."""
    rows = table(*((rank, micro, 3) for rank in range(2) for micro in range(2)))
    assert loss_under(span, rows, [3, 6, 9, 12]) == pytest.approx(30 / 12)


def test_an_unknown_denominator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown denominator 'mean'"):
        token_coefficients(table((0, 0, 1)), "mean")


def test_auxiliary_terms_are_averaged_over_rows() -> None:
    rows = table((0, 0, 2), (0, 1, 2), (1, 0, 4))
    tokens, auxiliary = row_coefficients(rows, PLAIN)
    assert tokens.tolist() == [1 / 8] * 3 and auxiliary.tolist() == [1 / 3] * 3
    _, other = row_coefficients(rows, Semantics(auxiliary="rank"))
    assert other.tolist() == [1 / 8, 1 / 8, 1 / 8]


def test_a_sum_over_ranks_and_a_lost_micro_batch() -> None:
    rows = table((0, 0, 2), (0, 1, 2), (1, 0, 4))
    assert row_coefficients(rows, Semantics(reduction="sum"))[0].tolist() == [2 / 8] * 3
    assert row_coefficients(rows, Semantics(accumulation="last"))[0].tolist() == [0, 1 / 8, 0]


# ---------------------------------------------------------------------------------------- what is invariant


@st.composite
def repartitions(draw: st.DrawFn) -> tuple[Case, Case]:
    """A case, and one with the same samples in the same order cut otherwise over ranks and micro-batches."""
    case = draw(cases(leave_out=("batch_norm", "conditional", "pairs"), precisions=(DOUBLE,), updates=1, used=True))
    rows = [n for rank in case.windows[0] for micro in rank for n in micro]
    ranks, micros = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), min_size=ranks * micros - 1, max_size=ranks * micros - 1)))
    parts = [tuple(rows[a:b]) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    window = tuple(tuple(parts[r * micros : (r + 1) * micros]) for r in range(ranks))
    return case, case.replace(windows=(window,), layout=Layout(ranks), accumulation=micros)


@settings(max_examples=40)
@given(repartitions())
def test_the_gradient_does_not_depend_on_who_fed_what(pair: tuple[Case, Case]) -> None:
    """The contract itself: the same rows give the same update on any number of ranks and micro-batches."""
    a, b = (one.gradients(c, PLAIN, 0, 0, canonical_weights(c)) for c in pair)
    scale = max((float(g.norm()) for g in a.values.values()), default=0.0)
    assert math.isclose(a.loss, b.loss, rel_tol=1e-12)
    assert set(a.values) == set(b.values)
    assert all(float((a.values[n] - b.values[n]).norm()) <= 1e-12 * scale for n in a.values)


@settings(max_examples=30)
@given(cases(leave_out=("pairs",), precisions=(DOUBLE,), updates=1, used=True), st.integers(0, 5))
def test_the_gradient_does_not_depend_on_the_grouping_of_rows(case: Case, variant: int) -> None:
    weights = canonical_weights(case)
    a = one.gradients(case, PLAIN, 0, 0, weights)
    b = one.gradients(case, PLAIN, 0, 0, weights, split(case, 0, variant))
    scale = max((float(g.norm()) for g in a.values.values()), default=0.0)
    assert all(float((a.values[n] - b.values[n]).norm()) <= 1e-12 * scale for n in a.values)


@settings(max_examples=20)
@given(cases(leave_out=("pairs",), precisions=(DOUBLE,), updates=1, used=True))
def test_the_mean_over_ranks_of_their_own_parts_is_the_gradient(case: Case) -> None:
    """What averaging synchronization does with `W * S_r / T`."""
    weights = canonical_weights(case)
    whole = one.gradients(case, PLAIN, 0, 0, weights)
    world = case.layout.dp
    parts = [one.gradients(case, PLAIN, 0, 0, weights, only_rank=rank) for rank in range(world)]
    assert math.isclose(sum(p.loss for p in parts) / world, whole.loss, rel_tol=1e-12)
    scale = max((float(g.norm()) for g in whole.values.values()), default=0.0)
    for name, gradient in whole.values.items():
        mean = sum(p.values[name] for p in parts if name in p.values) / world
        assert float((mean - gradient).norm()) <= 1e-12 * scale


def test_magnitude_scales_the_gradient_exactly() -> None:
    case = Case("scaled", Model("linear"), ((((3, 5),),),), Layout(1), precision=DOUBLE)
    weights = canonical_weights(case)
    a = one.gradients(case, PLAIN, 0, 0, weights)
    b = one.gradients(case.replace(magnitude=2.0**-20), PLAIN, 0, 0, weights)
    assert b.loss == a.loss * 2.0**-20
    assert torch.equal(b.values["linear.weight"], a.values["linear.weight"] * 2.0**-20)


def test_masked_positions_do_not_count() -> None:
    """Other targets and inputs where no token is valid: the same loss."""
    case = Case("masked", Model("linear"), ((((3,),),),), Layout(1), precision=DOUBLE)
    rows = rows_of(case, 0)
    weights = canonical_weights(case)
    inputs = np.where(rows.valid[:, :, None], rows.inputs, 9.0)
    scribbled = dataclasses.replace(rows, inputs=inputs, targets=np.where(rows.valid[:, :, None], rows.targets, 9.0))
    losses = []
    for shown in (rows, scribbled):
        batch = one.batch_of(case.model, 0, 0, shown, torch.arange(1), torch.float64)
        losses.append(float(one.row_sums(weights, batch).terms["main"]))
    assert losses[0] == losses[1] > 0


# ------------------------------------------------------------------------------------------ clip, trajectory


def clipping(limit: float | None, order: Any = "2") -> Case:
    return Case("clip", Model("linear"), ((((3,),),),), Layout(1), Optimizer(clip=limit, clip_norm=order))


def test_the_norm_counts_each_element_once() -> None:
    values = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([-4.0])}
    assert one.norm(values, "2") == 5.0 and one.norm(values, "inf") == 4.0 and one.norm({}, "2") == 0.0


@pytest.mark.parametrize(
    ("limit", "total", "coefficient"),
    [(None, 5.0, 1.0), (10.0, 5.0, 1.0), (1.0, 5.0, 1 / (5 + 1e-6)), (5e-7, 1e-6, 0.25), (1.0, 0.0, 1.0)],
)
def test_the_clip_coefficient_has_its_epsilon_beside_the_norm(limit: Any, total: float, coefficient: float) -> None:
    assert one.clip_coefficient(clipping(limit), PLAIN, total) == pytest.approx(coefficient, rel=1e-15)
    assert one.clip_coefficient(clipping(limit), Semantics(clip_scope="none"), total) == 1.0


@pytest.mark.parametrize("order", ["2", "inf"])
def test_clipping_is_torchs(order: str) -> None:
    case = clipping(0.25, order)
    found = one.gradients(case, PLAIN, 0, 0, canonical_weights(case)).values
    leaf = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    leaf.grad = found["linear.weight"].clone()
    total = torch.nn.utils.clip_grad_norm_([leaf], 0.25, float(order))
    assert one.norm(found, order) == pytest.approx(float(total), rel=1e-15)
    clipped = found["linear.weight"] * one.clip_coefficient(case, PLAIN, one.norm(found, order))
    assert torch.allclose(clipped, leaf.grad, rtol=1e-15, atol=0) and float(total) > 0.25


@pytest.mark.parametrize("empty", [((0,), (0, 0)), ((),), ()], ids=["no valid token", "no row", "no micro-batch"])
@pytest.mark.parametrize("optimizer", [*SIMPLE_OPTIMIZERS, Optimizer("adamw", weight_decay=0.5, schedule=(1.0, 0.5))])
def test_an_empty_window_changes_nothing(optimizer: Optimizer, empty: Any) -> None:
    """Weights, state and schedule go on as if the window had not been there."""
    first, last = (((3,), (2,)), ((5,),)), (((1,),), ((4, 4),))
    model = Model("linear", features=("bias",))
    windows = (first, (empty, ()), last)
    case = Case("empty", model, windows, Layout(2), optimizer, DOUBLE, accumulation=2)
    with_it = trajectory(case, PLAIN)
    assert [step.skipped for step in with_it.steps] == [False, True, False]
    assert [step.steps for step in with_it.steps] == [0, 1, 1]
    assert with_it.steps[2].rate == optimizer.rate(1)
    assert all(torch.equal(with_it.weights[1][n], with_it.weights[2][n]) for n in with_it.weights[1])
    assert all(torch.isfinite(w).all() for w in with_it.weights[3].values())
    assert expect(case, PLAIN).weights[3].keys() == with_it.weights[3].keys()


def test_skipped_windows_are_not_counted_by_the_optimizer() -> None:
    """The same two windows with and without an empty one between them: the same weights, bit for bit."""
    batch = (((3, 2),), ((5,),))
    hollow = (((),), ((),))  # no rows, so that the ids of the samples after it stay the same
    case = Case("two", Model("linear"), (batch, batch), Layout(2), Optimizer("adam"), DOUBLE)
    a, b = trajectory(case, PLAIN), trajectory(case.replace(windows=(batch, hollow, batch)), PLAIN)
    assert all(torch.equal(a.weights[2][n], b.weights[3][n]) for n in a.weights[2])


def test_sgd_by_hand() -> None:
    """One factor, one token: loss (wx - t)² / 2, gradient x (wx - t)."""
    case = Case("hand", Model("chain", depth=1), ((((1,),),),), Layout(1), Optimizer(lr=0.25), DOUBLE)
    (micro,) = window_of(case, 0, 0).microbatches
    x, t = float(micro.inputs[micro.valid][0, 0]), float(micro.targets[micro.valid][0, 0])
    w = float(canonical_weights(case)["factors.0"])
    found = trajectory(case, PLAIN)
    assert found.steps[0].loss == pytest.approx((w * x - t) ** 2 / 2, rel=1e-14)
    assert float(found.weights[1]["factors.0"]) == pytest.approx(w - 0.25 * x * (w * x - t), rel=1e-14)


# ------------------------------------------------------------------------------------------------- radii


@settings(max_examples=12)
@given(cases(precisions=(SINGLE, DOUBLE), worlds=(2, 4), updates=2, used=True))
def test_neutral_variants_stay_near_the_truth(case: Case) -> None:
    """A radius is rounding, not signal: a thousand units of the whole gradient at most."""
    try:
        expectation = expect(case, PLAIN)
    except CaseError:
        assume(False)
    for radii, step in zip(expectation.radius, expectation.steps, strict=True):
        whole = math.sqrt(sum(float(g.norm()) ** 2 for g in step.gradients.values()))
        assert all(radius <= 1000 * gradient_unit(case) * whole for radius in radii.values())
        assert set(radii) == set(step.gradients)


def test_a_radius_grows_with_the_unit_of_the_precision() -> None:
    """float64, float32 and bfloat16 give radii that lie orders of magnitude apart."""
    case = Case("units", Model("linear"), ((((5, 3),), ((2,),)),), Layout(2))
    precisions = [DOUBLE, SINGLE, dataclasses.replace(SINGLE, compute="bfloat16")]
    radii = [expect(case.replace(precision=p), PLAIN).radius[0]["linear.weight"] for p in precisions]
    assert 0 < radii[0] < 1e-6 * radii[1] < 1e-6 * 1e-2 * radii[2]


def test_a_case_at_a_discontinuity_is_refused() -> None:
    case = clipping(1.0)
    total = trajectory(case, PLAIN).steps[0].norm
    with pytest.raises(CaseError, match="at the clip threshold"):
        expect(clipping(total * 1.0001), PLAIN)
    assert expect(clipping(total * 1.01), PLAIN).steps[0].coefficient == 1.0
    assert expect(clipping(total * 0.99), PLAIN).steps[0].coefficient < 1.0


def test_a_case_that_is_not_exact_as_claimed_is_refused() -> None:
    case = Case("false claim", Model("linear", numbers="dyadic"), ((((3,),),),), Layout(1))
    with pytest.raises(CaseError, match="claims exact arithmetic, but update 0: token total 3 is not a power of two"):
        expect(case, PLAIN)


def test_rows_are_in_reading_order() -> None:
    case = Case("rows", Model("linear"), ((((3, 1), (2,)), (), ((4,),)),), Layout(3), accumulation=2)
    rows = rows_of(case, 0)
    assert (rows.rank.tolist(), rows.micro.tolist()) == ([0, 0, 0, 2], [0, 0, 1, 0])
    assert (rows.tokens.tolist(), rows.microbatches) == ([3, 1, 2, 4], (2, 0, 1))
    assert decode_ids(case.model, rows.inputs).tolist() == rows.ids.tolist() == [0, 1, 2, 3]
    assert isinstance(window_of(case, 0, 2).microbatches[0], MicroBatch)
