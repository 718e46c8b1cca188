"""Version tables of stale pipelines: which weights each scheme prescribes, and that the reference trains with those."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivtests.cases.case import Case, Model, Optimizer, Semantics
from equivtests.cases.layout import Layout
from equivtests.cases.staleness import Scheme, Staleness
from equivtests.reference import update as one
from equivtests.reference import versions
from equivtests.reference.expectation import trajectory
from equivtests.reference.forward import Weights
from equivtests.reference.rows import rows_of
from equivtests.reference.schedules import prescribed
from equivtests.reference.versions import RULES, History, Table, Used, first_difference, live_by_stage, version_table

EXAMPLES = json.loads((Path(__file__).parent / "data" / "worked-examples.json").read_text(encoding="utf-8"))


def forward(table: Table) -> list[list[int]]:
    """By stage, the forward versions of all mini-batches."""
    return [[row[s].forward for row in table] for s in range(len(table[0]))]


def backward(table: Table) -> list[list[int]]:
    return [[row[s].backward for row in table] for s in range(len(table[0]))]


def ahead(table: Table) -> list[list[int]]:
    return [[row[s].ahead for row in table] for s in range(len(table[0]))]


# ---------------------------------------------------------------------------------------------- tables by hand

STASHED = {
    2: [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]],
    3: [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]],
    4: [[0, 0, 0, 0, 1, 2], [0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]],
}
"""Worked out on paper from 1F1B without flushes: stage s has finished t - (P-1-s) backward passes when forward t starts."""


@pytest.mark.parametrize("P", STASHED)
def test_stashing_uses_what_each_stage_has_when_the_forward_pass_arrives(P: int) -> None:
    table = version_table("stashing", P, 6)
    assert forward(table) == backward(table) == STASHED[P]


@pytest.mark.parametrize("P", STASHED)
def test_vertical_sync_uses_the_version_of_the_first_stage_on_all(P: int) -> None:
    table = version_table("vertical-sync", P, 6)
    assert forward(table) == backward(table) == [STASHED[P][0]] * P


@pytest.mark.parametrize("P", STASHED)
def test_two_buffered_is_one_update_behind_whatever_the_stages(P: int) -> None:
    table = version_table("two-buffered", P, 6)
    assert forward(table) == backward(table) == [[0, 0, 1, 2, 3, 4]] * P


@pytest.mark.parametrize("P", STASHED)
def test_without_stashing_the_backward_pass_reads_the_newest_weights(P: int) -> None:
    table = version_table("unstashed", P, 6)
    assert forward(table) == STASHED[P] and backward(table) == [[0, 1, 2, 3, 4, 5]] * P


PREDICTED = {
    2: [[0, 1, 1, 1, 1, 1], [0] * 6],
    3: [[0, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1], [0] * 6],
    4: [[0, 1, 2, 3, 3, 3], [0, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1], [0] * 6],
}


@pytest.mark.parametrize("P", PREDICTED)
def test_prediction_makes_up_for_the_updates_that_a_stage_lacks(P: int) -> None:
    table = version_table("predicted", P, 6)
    assert forward(table) == STASHED[P] and ahead(table) == PREDICTED[P]


def test_after_a_drain_stashing_starts_again_and_two_buffered_keeps_both_buffers() -> None:
    assert forward(version_table("stashing", 3, 6, drains=(3,)))[0] == [0, 0, 0, 3, 3, 3]
    assert forward(version_table("stashing", 3, 6, drains=(3,)))[1] == [0, 0, 1, 3, 3, 4]
    assert forward(version_table("vertical-sync", 3, 6, drains=(3,))) == [[0, 0, 0, 3, 3, 3]] * 3
    assert version_table("two-buffered", 3, 6, drains=(3,)) == version_table("two-buffered", 3, 6)


@pytest.mark.parametrize(
    ("scheme", "stages", "minibatches", "words"),
    [
        ("stashed", 2, 3, "unknown scheme 'stashed'; known are newest, stashing"),
        ("stashing", 0, 3, "stages and mini-batches must be at least 1, got 0 and 3"),
        ("stashing", 2, 0, "must be at least 1, got 2 and 0"),
    ],
)
def test_what_has_no_table_is_refused(scheme: str, stages: int, minibatches: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        version_table(scheme, stages, minibatches)


# -------------------------------------------------------------------------------------------- telling apart


def tables(P: int, M: int) -> dict[str, Table]:
    return {scheme: version_table(scheme, P, M) for scheme in RULES}


@pytest.mark.parametrize("P", [2, 3, 4])
def test_all_schemes_share_the_first_mini_batch_and_part_from_one_device_at_the_second(P: int) -> None:
    schemes = tables(P, P + 2)
    assert len({table[0] for table in schemes.values()}) == 1
    assert {first_difference(schemes["newest"], table) for name, table in schemes.items() if name != "newest"} == {1}


def test_vertical_sync_is_two_buffered_at_two_stages_and_parts_from_it_at_the_third_mini_batch_with_more() -> None:
    assert version_table("vertical-sync", 2, 9) == version_table("two-buffered", 2, 9)
    for P in (3, 4, 8):
        schemes = tables(P, P + 2)
        assert first_difference(schemes["vertical-sync"], schemes["two-buffered"]) == 2


def test_a_prediction_shows_only_once_there_is_momentum() -> None:
    """At version 0 no update has been made, so that the second mini-batch cannot tell prediction from stashing."""
    assert first_difference(version_table("predicted", 3, 2), version_table("stashing", 3, 2)) is None
    assert first_difference(version_table("predicted", 3, 5), version_table("stashing", 3, 5)) == 2
    assert first_difference(version_table("predicted", 1, 5), version_table("stashing", 1, 5)) is None


# ------------------------------------------------------------------------------------------- live versions


def live(scheme: str, P: int, M: int, group: int = 1) -> list[int]:
    return list(live_by_stage(version_table(scheme, P, M), prescribed("1f1b", P, 1, M * group), group))


@pytest.mark.parametrize("example", EXAMPLES["live_weight_versions"])
def test_live_weight_versions(example: dict[str, Any]) -> None:
    P = example["stages"]
    assert live("stashing", P, 2 * P) == example["weight_stashing"]
    assert live("vertical-sync", P, 2 * P) == example["vertical_sync"]
    assert set(live("two-buffered", P, 2 * P, group=P)) == {example["two_buffered"]}


def test_four_stages_keep_as_many_versions_as_the_papers_say() -> None:
    """PipeDream, section 3.3; PipeDream-2BW, section 3.1; without a stash there is one."""
    assert live("stashing", 4, 8) == [4, 3, 2, 1]
    assert live("vertical-sync", 4, 8) == [4, 4, 4, 4]
    assert live("two-buffered", 4, 6, group=4) == live("two-buffered", 4, 6, group=7) == [2, 2, 2, 2]
    assert live("unstashed", 4, 8) == [1, 1, 1, 1]


def test_groups_smaller_than_the_pipeline_would_use_versions_that_are_not_made() -> None:
    """PipeDream-2BW needs m >= P; in 1F1B order P - 1 would do, and P - 2 would not."""
    table = version_table("two-buffered", 4, 5)
    broken = versions.not_made(table, prescribed("1f1b", 4, 1, 10), 2)
    assert broken == "the forward of micro-batch 4 on stage 0 uses weight version 1; the newest there is 0"
    assert [versions.not_made(table, prescribed("1f1b", 4, 1, 5 * m), m) for m in (3, 4, 5)] == ["", "", ""]


# ------------------------------------------------------------------------------------- what holds for all numbers

STAGES, MINIBATCHES = st.integers(1, 7), st.integers(1, 16)
DRAINS = st.lists(st.integers(0, 16), max_size=3)
MOST_BEHIND = {
    "newest": lambda P, s: 0,
    "stashing": lambda P, s: P - 1 - s,
    "vertical-sync": lambda P, s: P - 1,
    "two-buffered": lambda P, s: 1,
    "unstashed": lambda P, s: P - 1 - s,
    "predicted": lambda P, s: P - 1 - s,
}
"""By (P, s): the most updates that a stage's forward pass lacks."""


def test_every_scheme_has_a_bound_on_its_staleness() -> None:
    assert set(MOST_BEHIND) == set(RULES)


@given(st.sampled_from(sorted(RULES)), STAGES, MINIBATCHES, DRAINS)
def test_staleness_is_bounded_and_the_bound_is_reached(scheme: str, P: int, M: int, drains: list[int]) -> None:
    for s in range(P):
        most = MOST_BEHIND[scheme](P, s)
        behind = [t - row[s].forward for t, row in enumerate(version_table(scheme, P, M, drains))]
        assert min(behind) >= 0 and max(behind) <= most
        assert most >= M or drains or behind[-1] == most


@given(st.sampled_from(sorted(RULES)), STAGES, MINIBATCHES, DRAINS)
def test_versions_never_decrease_and_both_passes_agree_but_without_stashing(
    scheme: str, P: int, M: int, drains: list[int]
) -> None:
    table = version_table(scheme, P, M, drains)
    for row in (*forward(table), *backward(table)):
        assert row == sorted(row)
    assert scheme == "unstashed" or forward(table) == backward(table)
    assert scheme == "predicted" or set(itertools.chain(*ahead(table))) == {0}


@given(st.sampled_from(sorted(RULES)), STAGES, MINIBATCHES, DRAINS, st.integers(0, 16))
def test_a_drain_leaves_the_mini_batches_before_it_alone(
    scheme: str, P: int, M: int, drains: list[int], last: int
) -> None:
    table, again = version_table(scheme, P, M, drains), version_table(scheme, P, M, [*drains, last])
    assert table[:last] == again[:last]


@given(STAGES, MINIBATCHES, st.integers(0, 15))
def test_after_a_drain_stashing_starts_again_as_from_new_weights(P: int, M: int, drain: int) -> None:
    def later(table: Table) -> Table:
        return tuple(tuple(Used(u.forward + drain, u.backward + drain, u.ahead) for u in row) for row in table)

    for scheme in ("stashing", "vertical-sync", "unstashed", "predicted"):
        assert version_table(scheme, P, drain + M, [drain])[drain:] == later(version_table(scheme, P, M))


@given(st.sampled_from(["stashing", "vertical-sync", "unstashed", "predicted"]), STAGES, MINIBATCHES)
def test_a_pipeline_without_flushes_has_made_what_it_uses_and_keeps_at_most_a_version_per_stage(
    scheme: str, P: int, M: int
) -> None:
    table, orders = version_table(scheme, P, M), prescribed("1f1b", P, 1, M)
    assert versions.not_made(table, orders) == ""
    assert max(live_by_stage(table, orders)) <= P


@given(STAGES, st.integers(2, 6), st.integers(0, 3))
def test_two_buffers_suffice_for_any_pipeline_whose_groups_fill_it(P: int, M: int, more: int) -> None:
    table, orders = version_table("two-buffered", P, M), prescribed("1f1b", P, 1, M * (P + more))
    assert versions.not_made(table, orders, P + more) == ""
    assert set(live_by_stage(table, orders, P + more)) == {2}


def test_synchronous_training_needs_a_flush() -> None:
    words = versions.not_made(version_table("newest", 2, 2), prescribed("1f1b", 2, 1, 2))
    assert words == "the forward of micro-batch 1 on stage 0 uses weight version 1; the newest there is 0"


# ---------------------------------------------------------------------------------- what the reference trains with


def tuples(window_tokens: list[tuple[int, ...]]) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
    """Windows of one micro-batch on one rank, from the valid tokens of its rows."""
    return tuple(((rows,),) for rows in window_tokens)


def pipeline(P: int, optimizer: Optimizer, model: Model, updates: int = 7) -> Case:
    windows = tuples([(8 - u, 1 + u) for u in range(updates)])
    return Case(f"{model.family}-pp{P}", model, windows, Layout(dp=1, pp=P), optimizer)


SWINGING = Optimizer("momentum", lr=0.25, momentum=0.75)
DEEP = Model("mlp", width=6, depth=8, features=("bias",))


def gradients_of(case: Case, scheme: str) -> list[Weights]:
    staleness = Staleness(cast(Scheme, scheme))
    return [step.gradients for step in trajectory(case, Semantics(staleness=staleness)).steps]


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("P", [2, 3, 4])
def test_trajectories_part_where_their_tables_do(P: int) -> None:
    """Gradients of all windows before are equal bit for bit; those of that window, of several layers per stage, are not."""
    case = pipeline(P, SWINGING, DEEP)
    trained, schemes = {scheme: gradients_of(case, scheme) for scheme in RULES}, tables(P, case.updates)
    for a, b in itertools.combinations(RULES, 2):
        parted = [t for t in range(case.updates) if not same(trained[a][t], trained[b][t])]
        assert (parted[0] if parted else None) == first_difference(schemes[a], schemes[b]), (a, b)


def test_two_stages_of_one_linear_layer_hide_a_missing_stash_and_three_show_it() -> None:
    """The gradient of a product of two factors does not depend on the first one's version in the backward pass."""
    for P, hidden in ((2, True), (3, False)):
        case = pipeline(P, Optimizer("sgd", lr=0.125), Model("chain", depth=P))
        pairs = zip(gradients_of(case, "unstashed"), gradients_of(case, "stashing"), strict=True)
        assert all(itertools.starmap(same, pairs)) == hidden


def test_a_table_trains_as_the_scheme_that_it_writes_out() -> None:
    case = pipeline(3, SWINGING, DEEP)
    for scheme in RULES:
        rows = tuple(
            tuple((u.forward, u.backward, u.ahead) for u in row) for row in version_table(scheme, 3, case.updates)
        )
        written = trajectory(case, Semantics(staleness=Staleness("table", rows)))
        pairs = zip([step.gradients for step in written.steps], gradients_of(case, scheme), strict=True)
        assert all(itertools.starmap(same, pairs)), scheme


def test_a_window_without_tokens_makes_no_version() -> None:
    case = pipeline(3, SWINGING, DEEP)
    skipping = case.replace(windows=(*case.windows[:2], *tuples([(0, 0)]), *case.windows[2:]))
    for scheme in RULES:
        table = versions.table_of(skipping, Staleness(cast(Scheme, scheme)))
        assert (*table[:2], *table[3:]) == version_table(scheme, 3, case.updates)


def test_schemes_that_a_case_cannot_tell_apart_are_named() -> None:
    def named(case: Case, scheme: Scheme) -> list[str]:
        return versions.indistinguishable(case, Semantics(staleness=Staleness(scheme)))

    case = pipeline(2, SWINGING, DEEP)
    assert named(case, "vertical-sync") == ["two-buffered"] and named(case, "stashing") == []
    assert named(case.replace(layout=Layout(dp=1, pp=3)), "vertical-sync") == []
    assert named(case.replace(windows=case.windows[:1]), "stashing") == [name for name in RULES if name != "stashing"]


# ------------------------------------------------------------------------------------- worked examples, exactly


def factors(P: int, rate: float = 1.0) -> Case:
    """A product of P factors on P stages; the one valid token of each of two windows has input 1 and target 0."""
    model, layout = Model("chain", depth=P, numbers="dyadic"), Layout(dp=1, pp=P)
    case = Case("factors", model, tuples([(1,), (1,)]), layout, Optimizer("sgd", lr=rate))
    seeds = (case.replace(seed=seed) for seed in range(100))
    return next(c for c in seeds if all(only_token(c, window) == (1, 0) for window in range(2)))


def only_token(case: Case, window: int) -> tuple[float, float]:
    """(input, target) of the one valid token of a window."""
    rows = rows_of(case, window)
    return rows.inputs[rows.valid].item(), rows.targets[rows.valid].item()


def weights(*values: float) -> Weights:
    return {f"factors.{i}": torch.tensor([value], dtype=torch.float64) for i, value in enumerate(values)}


@pytest.mark.parametrize("example", EXAMPLES["pipedream_weight_stashing"])
def test_pipedream_weight_stashing(example: dict[str, Any]) -> None:
    """The forward pass of window 1 used b of version 0; the backward pass reads the stash, or the updated b."""
    case = factors(2)
    made = [weights(example["a"], example["b"]), weights(example["a"], example["updated_b"])]
    history = History(made.__getitem__, lambda version: {})
    for version, wanted in ((0, "grad_a_with_stashed_b"), (1, "wrong_grad_a_with_updated_b")):
        staleness = Staleness("table", (((0, 0), (0, 0)), ((0, 0), (0, version))))
        used = versions.seen(case, staleness, 1, history)
        found = one.gradients(case, Semantics(), 1, 1, used.forward, backward=used.backward)
        assert found.loss == example["forward_y"] ** 2 / 2
        assert found.values["factors.0"].item() == example[wanted]


@pytest.mark.parametrize("example", EXAMPLES["stale_update"])
def test_stale_update(example: dict[str, Any]) -> None:
    """With one factor the loss is w²/2."""
    case = factors(1, rate=example["learning_rate"])
    wanted = {
        "newest": example["second_update_with_current_gradient"],
        "two-buffered": example["second_update_with_gradient_from_version_0"],
    }
    for scheme, final in wanted.items():
        made = [weights(example["start"])]
        for window in range(2):
            used = versions.seen(case, Staleness(cast(Scheme, scheme)), window, History(made.__getitem__, lambda v: {}))
            found = one.gradients(case, Semantics(), window, window, used.forward, backward=used.backward)
            made.append(one.apply(case, Semantics(), window, made[-1], found.values, 1.0, {})[0])
        assert [w["factors.0"].item() for w in made[1:]] == [example["after_first_update"], final]


def test_the_next_version_is_made_from_the_newest_weights_and_the_stale_gradient() -> None:
    """W(2) = W(1) - lr · gradient at W(0): neither from W(0), nor by the gradient at W(1)."""
    case = factors(1, rate=0.5)
    delayed = trajectory(case, Semantics(staleness=Staleness("two-buffered")))
    start, first, second = (w["factors.0"].item() for w in delayed.weights)
    assert first == start - 0.5 * start and second == first - 0.5 * start


def test_a_prediction_moves_weights_along_their_momentum_at_the_rate_of_their_version() -> None:
    """W - ahead · rate · buffer; without a buffer, as at version 0, it is W itself."""
    case = pipeline(2, replace(SWINGING, schedule=(1.0, 0.5)), Model("chain", depth=2))
    buffers = [{}, {"factors.0": {"momentum_buffer": torch.tensor([2.0])}}]
    history = History(lambda version: weights(3.0, 5.0), buffers.__getitem__)
    for window, wanted in ((1, 3.0), (2, 3.0 - 1 * 0.25 * 0.5 * 2.0)):
        used = versions.seen(case, Staleness("predicted"), window, history)
        assert used.forward["factors.0"].item() == wanted and used.forward["factors.1"].item() == 5.0
        assert used.backward is None
