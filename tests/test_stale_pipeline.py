"""Pipelines without flushes: their numbers bit for bit, schemes told apart by the first update that can, own rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtests.adapters.adapter import Strategy
from equivtests.adapters.textbook.mesh import SPLIT_FEATURES
from equivtests.cases.case import DOUBLE, Case, Model, Optimizer, Precision, Semantics, Windows
from equivtests.cases.grid import longest
from equivtests.cases.layout import layout_of
from equivtests.cases.parameters import decays
from equivtests.cases.stale_grid import ONE_EACH, SWINGING
from equivtests.cases.staleness import Staleness
from equivtests.cases.windows import window_of
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Run
from equivtests.errors import CaseError
from equivtests.judge.check import Check, Verdict
from equivtests.judge.judge import judge
from equivtests.models.build import build
from equivtests.models.staged import Staged
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Record
from equivtests.reference.expectation import expect, refuse_discontinuities, trajectory
from equivtests.reference.versions import first_difference, indistinguishable, stage_of, table_of

STALE = "equivtests.adapters.textbook.stale_pipeline"
PIPEDREAM, SYNCHRONIZED = f"{STALE}:WeightStashing", f"{STALE}:VerticalSync"
TWO_BUFFERED, PREDICTED = f"{STALE}:TwoBuffered", f"{STALE}:PredictedWeights"

CHAIN, MLP = Model("chain", depth=8), Model("mlp", width=6, depth=8, features=("bias",))
FAST, ADAMW = Optimizer("sgd", lr=0.5), Optimizer("adamw", lr=2.0**-5, weight_decay=0.125, eps=2.0**-12)


def groups(stages: int) -> Windows:
    """P + 3 windows of P micro-batches."""
    updates, micros = range(stages + 3), range(stages)
    return tuple(((*(((k + u) % 8 + 1, (3 * k + u) % 9) for k in micros),),) for u in updates)


def stream(
    label: str, model: Model, windows: Windows, optimizer: Optimizer, precision: Precision = Precision()
) -> Case:
    layout = layout_of(label)
    assert layout is not None
    name = f"stream-{model.family}-{optimizer.name}-{label}"
    return Case(
        name, model, windows, layout, optimizer, precision, accumulation=longest(windows), asynchronous="pipeline"
    )


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(4, deadline=120.0)) as standing:
        yield standing


def run_of(adapter: str, name: str, case: Case) -> Run:
    strategy = next(s for s in claims_of(adapter).strategies if s.name == name)
    assert strategy.refusal(case) is None
    return Run("update", adapter, strategy, case)


def record_of(pools: Pools, adapter: str, name: str, case: Case) -> Record:
    outcome = pools.run(run_of(adapter, name, case).job())
    assert outcome.record is not None, outcome.failure
    return outcome.record


# ---------------------------------------------------------------------------------------------- bit for bit


class Simulated:
    """PipeDream in one process, mini-batch by mini-batch: the weights of every stage by version, and its optimizer."""

    def __init__(self, case: Case) -> None:
        self.case, self.stages = case, case.layout.pp
        self.newest = dict(self.module().named_parameters())
        self.versions = [self.copied()]
        self.optimizers = [self.optimizer(stage) for stage in range(self.stages)]

    def module(self) -> Staged:
        module, _ = build(self.case)
        assert isinstance(module, Staged)
        return module

    def copied(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.newest.items()}

    def optimizer(self, stage: int) -> torch.optim.Optimizer:
        o = self.case.optimizer
        here = {n: p for n, p in self.newest.items() if stage_of(self.case, n) == stage}
        split = [[p for n, p in here.items() if decays(self.case, n) is yes] for yes in (True, False)]
        parts = [{"params": part, "weight_decay": wd} for part, wd in zip(split, (o.weight_decay, 0.0), strict=True)]
        if o.name == "adamw":
            return torch.optim.AdamW(parts, lr=o.lr, betas=o.betas, eps=o.eps)
        return torch.optim.SGD(parts, lr=o.lr, momentum=o.momentum)

    def version_on(self, stage: int, t: int) -> int:
        return max(0, t - (self.stages - 1 - stage))

    def step(self, t: int) -> None:
        """One mini-batch: forward through all stages, backward through all, one step of each optimizer."""
        module = self.module()
        for name, parameter in module.named_parameters():
            parameter.data.copy_(self.versions[self.version_on(stage_of(self.case, name), t)][name])
        self.passes(module, t)
        for name, parameter in module.named_parameters():
            self.newest[name].grad = parameter.grad
        for optimizer in self.optimizers:
            optimizer.step()
        self.versions.append(self.copied())

    def passes(self, module: Staged, t: int) -> None:
        batch = window_of(self.case, t, 0).microbatches[0]
        inputs, targets = (self.tensor(a) for a in (batch.inputs, batch.targets))
        x, cuts = module.begin(inputs, torch.from_numpy(batch.ids)), list[tuple[Tensor, Tensor]]()
        for stage, layers in enumerate(self.case.layout.layers_of(self.case.model.depth)):
            if stage:
                cuts.append((x, x.detach().requires_grad_()))
                x = cuts[-1][1]
            for i in layers:
                x = module.layer(i, x, inputs)
        (module.end(x, targets, torch.from_numpy(batch.valid), False)["main"] * (1 / batch.tokens)).backward()
        for left, entered in reversed(cuts):
            left.backward(entered.grad)

    def tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(getattr(torch, self.case.precision.weights)) if tensor.is_floating_point() else tensor


TEN: Windows = (*ONE_EACH, (((5, 6),),), (((8, 2),),))


@pytest.mark.parametrize("precision", [Precision(), DOUBLE], ids=lambda precision: precision.label)
@pytest.mark.parametrize("optimizer", [SWINGING, ADAMW], ids=lambda optimizer: optimizer.name)
def test_ten_mini_batches_of_pipedream_are_bitwise_those_of_the_version_table(
    pools: Pools, optimizer: Optimizer, precision: Precision
) -> None:
    case = stream("pp3", MLP, TEN, optimizer, precision)
    simulated, record = Simulated(case), record_of(pools, PIPEDREAM, "pipedream", case)
    for t in range(case.updates):
        simulated.step(t)
    for o in record.of("weight"):
        assert np.array_equal(o.array, simulated.versions[o.update][o.name].numpy()), (o.update, o.name)
    assert {(o.update, o.name) for o in record.of("weight")} == {
        (u, name) for u in range(11) for name in simulated.newest
    }


@pytest.mark.parametrize("label", ["pp2", "pp4"])
def test_a_checkpoint_of_what_is_in_flight_changes_no_bit_of_the_run(pools: Pools, tmp_path: Path, label: str) -> None:
    """Neither where it is saved nor where it is loaded; and the operations before it are not run, or shown, again."""
    run = run_of(PIPEDREAM, "pipedream", stream(label, MLP, TEN, SWINGING))
    whole = record_of(pools, PIPEDREAM, "pipedream", run.case)
    saving, loading = pools.run(run.job(save_to=str(tmp_path))), pools.run_fresh(run.job(load_from=str(tmp_path)))
    assert saving.record is not None and loading.record is not None, (saving.failure, loading.failure)
    late = run.case.save_after
    assert shown(saving.record, 0) == shown(whole, 0)
    assert shown(loading.record, 0) == shown(loading.record, late) == shown(whole, late)


def shown(record: Record, start: int) -> dict[tuple[str, str, int, int], bytes]:
    """Weights, state, gradients and operations from an update on, by what, rank and update."""
    kinds = ("weight", "state", "gradient", "timeline")
    found = [o for kind in kinds for o in record.of(kind) if o.update >= start]
    return {(o.kind, o.name, o.rank, o.update): o.array.tobytes() for o in found}


# ---------------------------------------------------------------------------------------------- telling schemes apart

SCHEMES = ("stashing", "vertical-sync", "two-buffered", "newest")
TELLING = {"timeline", "live"}


def rule(scheme: str) -> Semantics:
    return Semantics(staleness=Staleness(versions=scheme))  # type: ignore[arg-type]


def clear_of_branches(case: Case) -> Case:
    """The case with the first seed that keeps its distance from the kinks of ReLUs under every scheme."""
    for seed in range(16):
        seeded = case.replace(seed=seed)
        try:
            for scheme in SCHEMES:
                refuse_discontinuities(trajectory(seeded, rule(scheme)))
        except CaseError:
            continue
        return seeded
    raise AssertionError(f"{case.name}: every seed comes near a branch")


def first_fault(case: Case, strategy: Strategy, record: Record, scheme: str) -> Check | None:
    """What a record that is judged by a scheme fails by first."""
    claimed = replace(strategy, semantics=rule(scheme))
    return judge(case, claimed, record, expect(case, rule(scheme))).first


def numbers_only(strategy: Strategy, record: Record) -> tuple[Strategy, Record]:
    """Both without what names the versions."""
    kept = [o for o in record.observations if o.kind not in TELLING]
    return replace(strategy, observes=strategy.observes - TELLING), replace(record, observations=kept)


def judge_pair(case: Case, strategy: Strategy, record: Record, ran: str, claimed: str, by: set[str]) -> None:
    """A record of one scheme under the claim of another: it fails at the first window in which they differ, if any."""
    parts = first_difference(table_of(case, rule(ran).staleness), table_of(case, rule(claimed).staleness))
    found = first_fault(case, strategy, record, claimed)
    if parts is None:
        assert found is None
        assert claimed in (ran, *indistinguishable(case, rule(ran)))
    else:
        assert found is not None and (found.update, found.quantity in by) == (parts, True), (ran, claimed, found)


@pytest.mark.parametrize("model", [CHAIN, MLP], ids=lambda model: model.family)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_scheme_under_the_claim_of_another_fails_at_the_first_update_that_can_tell(
    pools: Pools, stages: int, model: Model
) -> None:
    """By the versions that it shows, and, where it shows none, by its numbers."""
    case = clear_of_branches(stream(f"pp{stages}", model, groups(stages), FAST))
    for ran in SCHEMES:
        run = run_of("stale_adapters:ByRule", ran, case)
        record = record_of(pools, "stale_adapters:ByRule", ran, case)
        plain = replace(run.strategy, observes=run.strategy.observes - {"live"})
        silent = replace(record, observations=[o for o in record.observations if o.kind != "live"])
        for claimed in SCHEMES:
            if "newest" not in (ran, claimed):  # a pipeline that is flushed runs another order
                judge_pair(case, plain, silent, ran, claimed, {"versions"})
            judge_pair(case, *numbers_only(plain, silent), ran, claimed, {"output", "loss", "gradient"})


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stashing_and_vertical_sync_are_told_apart_on_single_micro_batches(pools: Pools, stages: int) -> None:
    case = clear_of_branches(stream(f"pp{stages}", MLP, ONE_EACH, FAST))
    adapters = {"stashing": (PIPEDREAM, "pipedream"), "vertical-sync": (SYNCHRONIZED, "pipedream-vertical-sync")}
    for ran, claimed in permutations(adapters):
        run, record = run_of(*adapters[ran], case), record_of(pools, *adapters[ran], case)
        judge_pair(case, run.strategy, record, ran, claimed, {"versions"})
        judge_pair(case, *numbers_only(run.strategy, record), ran, claimed, {"output", "loss", "gradient"})


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        (PIPEDREAM, "pipedream"),
        (SYNCHRONIZED, "pipedream-vertical-sync"),
        (TWO_BUFFERED, "pipedream-2bw"),
        (PREDICTED, "pipedream-predicted"),
    ],
)
def test_a_window_without_a_valid_token_passes_through_no_stage(pools: Pools, adapter: str, name: str) -> None:
    """Nor does it age the versions of those around it."""
    empty: Windows = ((((0, 0),) * (3 if adapter == TWO_BUFFERED else 1),),)
    windows = groups(3) if adapter == TWO_BUFFERED else ONE_EACH
    case = clear_of_branches(stream("pp3", MLP, (*windows[:3], *empty, *windows[3:]), SWINGING, DOUBLE))
    result = certify(pools, run_of(adapter, name, case), confirm=False)
    assert result.verdict is Verdict.PASS, result.explanation


# ---------------------------------------------------------------------------------------------- rules of one's own


@pytest.mark.parametrize(("adapter", "name"), [("OneCopy", "one-copy"), ("FirstStashes", "first-stashes")])
@pytest.mark.parametrize("label", ["pp2", "pp3", "pp4"])
def test_a_table_of_ones_own_is_certified(pools: Pools, adapter: str, name: str, label: str) -> None:
    run = run_of(f"stale_adapters:{adapter}", name, stream(label, MLP, ONE_EACH, FAST))
    result = certify(pools, run, confirm=False)
    assert result.verdict is Verdict.PASS, result.explanation


def test_a_rule_of_ones_own_is_not_taken_for_stashing(pools: Pools) -> None:
    """The backward pass of mini-batch 1 on the first of three stages is the first with weights of its own."""
    case = stream("pp3", MLP, ONE_EACH, FAST)
    run, record = (f("stale_adapters:OneCopy", "one-copy", case) for f in (run_of, lambda *a: record_of(pools, *a)))
    found = first_fault(case, run.strategy, record, "stashing")
    assert found is not None and (found.update, found.quantity) == (1, "versions")
    found = first_fault(case, *numbers_only(run.strategy, record), "stashing")
    assert found is not None and (found.update, found.quantity) == (1, "gradient")


# ---------------------------------------------------------------------------------------------- what is claimed and refused

FEATURED = Model("gpt", width=8, depth=2, vocabulary=13, features=tuple(sorted(SPLIT_FEATURES - {"tied"})))


@pytest.mark.parametrize(("adapter", "name"), [(PIPEDREAM, "pipedream"), (TWO_BUFFERED, "pipedream-2bw")])
def test_every_feature_that_is_claimed_works_in_one_model(pools: Pools, adapter: str, name: str) -> None:
    """Dropout among them: drawn by the number of the window, not by the updates that a stage has made."""
    windows = ONE_EACH[:4] if adapter == PIPEDREAM else groups(2)[:4]
    result = certify(pools, run_of(adapter, name, stream("pp2", FEATURED, windows, SWINGING)), confirm=False)
    assert result.verdict is Verdict.PASS, result.explanation


@pytest.mark.parametrize(("adapter", "name"), [(PIPEDREAM, "pipedream"), (PREDICTED, "pipedream-predicted")])
def test_stages_that_use_different_versions_refuse_what_needs_all_of_them(adapter: str, name: str) -> None:
    (strategy,) = claims_of(adapter).strategies
    gpt = Model("gpt", width=8, depth=4, features=("bias", "tied"))
    clipped = replace(SWINGING, clip=0.25)
    assert strategy.refusal(stream("pp2", MLP, ONE_EACH, clipped)) == "clipping by norm 2"
    assert strategy.refusal(stream("pp2", gpt, ONE_EACH, SWINGING)) == "feature tied"


def test_groups_that_do_not_fill_the_pipeline_are_refused_by_two_buffers() -> None:
    (strategy,) = claims_of(TWO_BUFFERED).strategies
    words = strategy.refusal(stream("pp4", MLP, groups(3), FAST))
    assert words == "fewer than 4 micro-batches for 4 pipeline ranks"
