"""Cases are plain data: one text form, read strictly; their windows are deterministic and carry their sample ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import FAMILIES, cases, models, samples_of, semantics

from equivtests.cases.case import Case, Layout, Model, Optimizer, Semantics, dumps, loads
from equivtests.cases.grid import GRID, LEDGER_CASES, RESTORE_CASES, TIERS, Row, fold, tier_of, too_large, worlds_of
from equivtests.cases.grid import cases as tier_cases
from equivtests.cases.layout import layout_of
from equivtests.cases.parameters import initial, layers, parameters
from equivtests.cases.split_grid import SPLIT_GRID, split_cases
from equivtests.cases.windows import Feed, decode_ids, empty_micro_batch, sample, window_of
from equivtests.errors import CaseError
from equivtests.reference.expectation import Expectation, expect

PLAIN = Case("plain", Model("linear"), (((((3, 1),)), (((2,),))),), Layout(2))

# ------------------------------------------------------------------------------------------------- JSON


@given(cases(), semantics())
def test_a_case_survives_its_text_form(case: Case, contract: Semantics) -> None:
    case = case.replace(semantics=contract)
    assert loads(dumps(case)) == case
    assert dumps(loads(dumps(case))) == dumps(case)


@given(cases())
def test_the_text_form_does_not_depend_on_how_the_file_was_written(case: Case) -> None:
    """Other spacing, other order of keys, integers where floats belong: the same case, hence the same text."""
    whole = json.loads(dumps(case), parse_float=lambda text: int(float(text)) if float(text) % 1 == 0 else float(text))
    data = dict(reversed(whole.items()))
    assert dumps(loads(json.dumps(data))) == dumps(case)


def test_the_text_form_is_pinned() -> None:
    """Fixtures of other versions are read for years: a change of this text is a change of the schema."""
    lines = dumps(PLAIN).splitlines()
    assert lines[:5] == ["{", '  "accumulation": 1,', '  "layout": {', '    "dp": 2,', '    "replicate": 1']
    assert len(lines) == 70 and dumps(PLAIN).endswith("}\n") and '  "schema": 1,' in lines


def test_what_has_a_default_may_be_left_out() -> None:
    text = '{"name": "n", "model": {"family": "chain"}, "windows": [[[[1]]]], "layout": {"dp": 1}}'
    assert loads(text) == Case("n", Model("chain"), ((((1,),),),), Layout(1))


def changed(*path: str | int, value: Any) -> str:
    """The text of the plain case with one place changed."""
    data = json.loads(dumps(PLAIN))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data)


def without(name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(dumps(PLAIN)).items() if key != name})


MALFORMED = {
    "case: not JSON": "{",
    "case: not JSON: maximum recursion": "[" * 100_000,
    "case: expected an object, got []": "[]",
    "case: unknown field 'colour'": changed("colour", value="red"),
    "case.model: unknown field 'hats'": changed("model", "hats", value=2),
    "case: field 'model' is missing": without("model"),
    "case: field 'windows' is missing": without("windows"),
    "case.name: expected str, got 7": changed("name", value=7),
    "case.seed: expected int, got true": changed("seed", value=True),
    "case.seed: expected int, got 1.0": changed("seed", value=1.0),
    "case.magnitude: expected a finite number, got true": changed("magnitude", value=True),
    "case.optimizer.lr: expected a finite number, got NaN": changed("optimizer", "lr", value=float("nan")),
    "case.optimizer.lr: expected a finite number, got Infinity": changed("optimizer", "lr", value=float("inf")),
    "case.optimizer.lr: expected a finite number, got 1000": changed("optimizer", "lr", value=10**400),
    'case.optimizer.lr: expected a finite number, got "1"': changed("optimizer", "lr", value="1"),
    "case.optimizer.decay_vectors: expected bool, got 1": changed("optimizer", "decay_vectors", value=1),
    "case.optimizer.betas: expected 2 items, got [0.5]": changed("optimizer", "betas", value=[0.5]),
    "case.optimizer.betas[1]: expected a finite number, got null": changed("optimizer", "betas", value=[0.5, None]),
    "case.windows: expected a list, got 3": changed("windows", value=3),
    'case.windows[0][1][0][0]: expected int, got "2"': changed("windows", 0, 1, 0, 0, value="2"),
    "case.model.family: expected one of ['chain', 'linear', 'mlp', 'gated_mlp', 'gpt', 'moe', 'own'], got": changed(
        "model", "family", value="rnn"
    ),
    "case.optimizer.name: expected one of ['sgd',": changed("optimizer", "name", value="lion"),
    "case.precision.loss_scale: expected an object, got 2": changed("precision", "loss_scale", value=2),
    "case 'plain': schema is 2; this version reads 1": changed("schema", value=2),
    "case 'plain': every window needs 3 ranks (layout.dp)": changed("layout", "dp", value=3),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_text_is_refused_in_one_line_that_names_the_place(message: str) -> None:
    with pytest.raises(CaseError) as caught:
        loads(MALFORMED[message])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


INVALID: dict[str, dict[str, Any]] = {
    "name is empty": {"name": ""},
    "model.features: linear has no 'tied'": {"model": Model("linear", features=("tied",))},
    "model.features must be sorted and unique": {"model": Model("linear", features=("unused", "bias"))},
    "model.inputs must be at least 2": {"model": Model("linear", inputs=1)},
    "model.width 3 of gpt must be divisible by its 2 heads": {"model": Model("gpt", width=3)},
    "model.heads and top_k must be at least 1": {"model": Model("gpt", heads=0)},
    "model.kv_heads 3 must divide the 4 heads": {"model": Model("gpt", heads=4, kv_heads=3)},
    "model.features: shared_kv is one head": {"model": Model("gpt", kv_heads=2, features=("shared_kv",))},
    "model.length must be at least 4 for two documents": {"model": Model("gpt", length=3, features=("packed",))},
    "model.experts: a moe has at least 2": {"model": Model("moe", experts=1)},
    "model.experts: a moe has at least 2, other families have none": {"model": Model("gpt", experts=2)},
    "model.top_k 3 must not exceed the 2 experts": {"model": Model("moe", experts=2, top_k=3)},
    "model.capacity limits experts": {"model": Model("gpt", capacity=1)},
    "model.numbers: moe has no exact arithmetic": {"model": Model("moe", experts=2, numbers="dyadic")},
    "lengths: only gpt ignores what is cut off": {"lengths": (8,)},
    "lengths must lie in 2..8": {"model": Model("gpt"), "lengths": (1,)},
    "valid tokens must not exceed the length of their micro-batch": {"model": Model("gpt"), "lengths": (2,)},
    "model.length must be at least 8": {"model": Model("linear", length=7)},
    "model.length must be at least 2": {"model": Model("gpt", length=1), "windows": (((), ()),)},
    "model.vocabulary must be at least 13": {"model": Model("gpt", vocabulary=12)},
    "model sizes must be at least 1": {"model": Model("chain", depth=0)},
    "model.features: frozen leaves nothing": {"model": Model("mlp", depth=1, features=("frozen", "unused"))},
    "model.numbers: gpt has no exact arithmetic": {"model": Model("gpt", numbers="dyadic")},
    "layout degrees must be at least 1": {"layout": Layout(2, 0)},
    "layout.replicate 2 must divide dp 3": {"layout": Layout(3, 2), "windows": (((), (), ()),)},
    "windows is empty": {"windows": ()},
    "every window needs 2 ranks": {"windows": ((((1,),),),)},
    "valid tokens must lie in 0..8": {"windows": ((((9,),), ()),)},
    "170 samples; a case holds at most 169": {"windows": ((((1,) * 170,), ()),)},
    "accumulation must be at least 1": {"accumulation": 0},
    "a rank has more micro-batches than accumulation 1": {"windows": ((((1,), (1,)), ()),)},
    "magnitude must be a power of two": {"magnitude": 0.75},
    "optimizer.lr must be positive": {"optimizer": Optimizer(lr=0.0)},
    "optimizer.schedule is empty": {"optimizer": Optimizer(schedule=())},
    "optimizer.clip must be positive or null": {"optimizer": Optimizer(clip=0.0)},
    "seed must not be negative": {"seed": -1},
}


@pytest.mark.parametrize("message", INVALID)
def test_a_case_that_no_component_understands_cannot_be_built(message: str) -> None:
    with pytest.raises(CaseError) as caught:
        PLAIN.replace(**INVALID[message])
    assert str(caught.value).partition(": ")[2].startswith(message)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- windows


@given(models(), st.integers(0, 9), st.lists(st.integers(0, 168), max_size=4))
def test_ids_are_read_back_from_the_inputs_in_any_dtype(model: Model, seed: int, ids: list[int]) -> None:
    empty = empty_micro_batch(PLAIN.replace(model=model)).inputs
    inputs = np.stack([sample(model, seed, i)[0] for i in ids]) if ids else empty
    assert decode_ids(model, inputs).tolist() == ids
    if not model.decoder:
        for dtype in (torch.float32, torch.bfloat16):
            cast = torch.from_numpy(inputs).to(dtype).float().numpy()
            assert decode_ids(model, cast).tolist() == ids


@pytest.mark.parametrize("family", FAMILIES)
def test_every_id_that_a_case_may_hold_is_read_back(family: Any) -> None:
    counts = tuple((0,) * 169 for _ in range(1))
    case = Case("full", Model(family, experts=2 * (family == "moe")), ((counts,),), Layout(1))
    (batch,) = window_of(case, 0, 0).microbatches
    assert decode_ids(case.model, batch.inputs).tolist() == list(range(169))


@given(cases())
def test_every_sample_of_a_case_has_an_id_of_its_own(case: Case) -> None:
    ids = samples_of(case)
    total = sum(len(micro) for window in case.windows for rank in window for micro in rank)
    assert ids == list(range(total))


@given(cases())
def test_windows_are_deterministic_and_hold_the_tokens_that_the_case_says(case: Case) -> None:
    for update in range(case.updates):
        total = 0
        for rank in range(case.layout.dp):
            first, again = window_of(case, update, rank), window_of(case, update, rank)
            assert len(first.microbatches) == len(case.windows[update][rank])
            for k, (a, b) in enumerate(zip(first.microbatches, again.microbatches, strict=True)):
                assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("inputs", "targets", "valid", "ids"))
                assert a.valid.sum(axis=1).tolist() == list(case.windows[update][rank][k])
                assert a.conditional == (k == 0 and a.rows > 0)
                total += a.tokens
        assert total == case.tokens(update)


def test_windows_do_not_share_memory() -> None:
    """An adapter that scribbles on its data does not change what others are fed."""
    first = window_of(PLAIN, 0, 0).microbatches[0]
    before = first.inputs.copy()
    first.inputs[:] = 7
    assert np.array_equal(window_of(PLAIN, 0, 0).microbatches[0].inputs, before)


def test_different_seeds_feed_different_data_and_weights() -> None:
    other = PLAIN.replace(seed=1)
    assert not np.array_equal(*(window_of(c, 0, 0).microbatches[0].inputs for c in (PLAIN, other)))
    assert not np.array_equal(*(initial(c)["linear.weight"] for c in (PLAIN, other)))


def test_a_feed_goes_on_where_it_was_put() -> None:
    case = PLAIN.replace(windows=PLAIN.windows * 3)
    feed = Feed(case, 1)
    feed.seek(1)
    assert [window.update for window in feed] == [1, 2] and feed.position == 3
    assert [window.update for window in Feed(case, 1, stop=2)] == [0, 1]


@given(cases())
def test_canonical_weights_are_exact_in_float32_and_named_once(case: Case) -> None:
    weights = initial(case)
    assert len(weights) == len(parameters(case.model))
    for parameter in parameters(case.model):
        value = weights[parameter.name]
        assert value.shape == parameter.shape and np.array_equal(value.astype(np.float32), value)
    assert set().union(*layers(case.model)) <= set(weights)


# ------------------------------------------------------------------------------------------------- grid

LINES = [(row, world) for row in GRID for world in row.worlds]
CLIPPED = [(row, world) for row, world in LINES if row.make(world, 0).optimizer.clip is not None]


def named(line: tuple[Row, int]) -> str:
    return f"{line[0].name}-w{line[1]}"


def expected(line: tuple[Row, int]) -> Expectation:
    case = line[0].make(line[1], 0)
    return expect(case, case.semantics)


@pytest.mark.parametrize("line", LINES, ids=named)
def test_the_reference_accepts_every_case_of_the_grid(line: tuple[Row, int]) -> None:
    """No ReLU kink, no clip threshold nearby; what claims to be exact is proved to be."""
    expectation = expected(line)
    case = expectation.case
    assert case.name == named(line) and case.layout.world == line[1]
    assert case.exact == (expectation.proof is not None)
    assert loads(dumps(case)) == case


def test_names_are_distinct_and_tiers_nest() -> None:
    names = [[case.name for case in tier_cases(tier, 4)] for tier in TIERS]
    assert all(len(set(listed)) == len(listed) for listed in names)
    assert set(names[0]) < set(names[1]) < set(names[2]) == {named(line) for line in LINES}
    split = {case.name for case in split_cases("nightly", 16)}
    assert set(names[2]) | split >= RESTORE_CASES.keys() | LEDGER_CASES.keys()


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_what_does_not_fit_is_listed(nproc: int) -> None:
    fits = {case.name for case in tier_cases("nightly", nproc)}
    listed = {named(line) for line in LINES}
    assert (fits & listed) | {name for name, _ in too_large("nightly", nproc)} == listed
    assert all(world > nproc for _, world in too_large("nightly", nproc))


FOLDED = [(line, world) for line in GRID for world in (1, 2, 3) if world in worlds_of(line, world, exactly=True)]


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_row_that_needs_more_ranks_feeds_its_data_to_those_that_are_there(nproc: int) -> None:
    """Not if it lies in copies, or adds up exactly in halves."""
    ran = {case.name.rpartition("-w")[0] for case in tier_cases("nightly", nproc)}
    left = {line.name for line in GRID} - ran
    assert {"mlp-hsdp", "mlp-hsdp-one-shard"} <= left
    assert left <= {"mlp-hsdp", "mlp-hsdp-one-shard", "exact-mlp", "exact-linear-double"}
    assert all(case.layout.world <= nproc for case in tier_cases("nightly", nproc))


@pytest.mark.parametrize("line", FOLDED, ids=named)
def test_the_reference_accepts_every_row_on_fewer_ranks(line: tuple[Row, int]) -> None:
    assert expected(line).case.layout.world == line[1]


def test_restoring_and_counting_follow_a_row_to_fewer_ranks() -> None:
    assert tier_of(RESTORE_CASES, "gpt-dropout-w4") == tier_of(RESTORE_CASES, "gpt-dropout-w2") == "default"
    assert tier_of(LEDGER_CASES, "gpt-adamw-w3") == "quick", "the earliest of its row"
    assert tier_of(RESTORE_CASES, "linear-sgd-w4") is None, "a case of the grid that is not restored"
    assert tier_of(RESTORE_CASES, "mlp-unused-w2") is None
    assert tier_of(LEDGER_CASES, "gpt-tp4") == "nightly" and tier_of(LEDGER_CASES, "gpt-tp3") is None


def test_a_seed_changes_the_name() -> None:
    assert {c.name for c in tier_cases("nightly", 4, 1)}.isdisjoint(c.name for c in tier_cases("nightly", 4))


@given(st.data())
def test_folding_keeps_every_row(data: st.DataObject) -> None:
    windows = data.draw(cases(worlds=(4,))).windows
    ranks = data.draw(st.sampled_from((1, 2, 3, 4)))
    for before, after in zip(windows, fold(windows, ranks), strict=True):
        assert len(after) == ranks
        assert sorted(m for rank in after for m in rank) == sorted(m for rank in before for m in rank)


def grid_windows(world: int) -> list[tuple[Case, Any]]:
    return [(row.make(world, 0), w) for row in GRID if world in row.worlds for w in row.make(world, 0).windows]


MASKS = {
    "ranks have the same tokens": lambda c, w: len({sum(map(sum, rank)) for rank in w}) == len(w),
    "ranks have the same number of micro-batches": lambda c, w: len({len(rank) for rank in w}) > 1,
    "every rank has rows": lambda c, w: any(not any(rank) for rank in w) and c.tokens(0) > 0,
    "every micro-batch has a valid token": lambda c, w: any(m and not sum(m) for rank in w for m in rank),
    "every window has a valid token": lambda c, w: not any(sum(m) for rank in w for m in rank) and c.updates > 2,
    "one micro-batch per update": lambda c, w: all(len(rank) > 1 for rank in w),
    "every window is full": lambda c, w: max(map(len, w)) < c.accumulation and c.tokens(0) > 0,
    "rows have the same tokens": lambda c, w: len({n for rank in w for m in rank for n in m}) > 4,
    "the token total is a multiple of the world": lambda c, w: sum(sum(m) for r in w for m in r) % len(w) != 0,
}


@pytest.mark.parametrize("mask", MASKS)
def test_the_grid_breaks_what_usually_hides_mistakes(mask: str) -> None:
    assert any(MASKS[mask](case, window) for case, window in grid_windows(4))


@pytest.mark.parametrize("world", [3, 4])
def test_the_grid_has_sizes_that_the_world_does_not_divide(world: int) -> None:
    """Whole tensors, their first dimension and the whole model, in one case."""
    drawn = [row.make(world, 0) for row in GRID if world in row.worlds]
    listed = [parameters(case.model) for case in drawn]
    assert any(
        any(p.size % world for p in ps) and any(p.shape[0] % world for p in ps) and sum(p.size for p in ps) % world
        for ps in listed
    )


def test_the_grid_has_tensors_that_leave_a_rank_without_a_row() -> None:
    assert any(p.shape[0] < 4 for row in GRID if 4 in row.worlds for p in parameters(row.make(4, 0).model))


@pytest.mark.parametrize("line", CLIPPED, ids=named)
def test_clipping_really_clips_at_every_update(line: tuple[Row, int]) -> None:
    assert all(step.skipped or step.coefficient < 1 for step in expected(line).steps)


def test_both_norms_are_clipped_by() -> None:
    assert {row.make(world, 0).optimizer.clip_norm for row, world in CLIPPED} == {"2", "inf"}


def test_a_gradient_near_the_clip_epsilon_occurs() -> None:
    """There the 1e-6 that is added to the norm is no longer negligible, and an absolute tolerance would be blind."""
    norms = [step.norm for line in CLIPPED for step in expected(line).steps]
    assert any(1e-7 < norm < 1e-5 for norm in norms)


def test_every_optimizer_family_and_feature_occurs() -> None:
    drawn = [row.make(world, 0) for row, world in LINES]
    assert {c.optimizer.name for c in drawn} == {"sgd", "momentum", "adam", "adamw"}
    split = {row.make(layout_of(row.layouts[0]) or Layout(1), 0).model.family for row in SPLIT_GRID}
    assert {c.model.family for c in drawn} | split == set(FAMILIES)
    assert any(len(set(c.optimizer.schedule)) > 1 and c.updates > 1 for c in drawn)
    assert any(not c.optimizer.decay_vectors and c.optimizer.weight_decay and c.model.has("bias") for c in drawn)
