"""Local SGD: the reference against loops of plain torch, its limits, and what the judge tells apart on real ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equivtests.adapters.builtin import BUILTIN
from equivtests.cases.case import DOUBLE, Case, Layout, Model, Optimizer, Semantics, Windows, validate
from equivtests.cases.staleness import Staleness
from equivtests.cases.windows import window_of
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Run
from equivtests.chapters.update import judge_update
from equivtests.errors import CaseError
from equivtests.judge.check import Verdict
from equivtests.judge.form import form_problems
from equivtests.models.build import build
from equivtests.mutants.local import IDLE_WORKER, THREE_WORKERS, WITH_MOMENTUM
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Record
from equivtests.reference import local
from equivtests.reference.expectation import Expectation, expect, trajectory
from equivtests.reference.rows import rows_of

MLP = Model("mlp", width=4, depth=2, features=("bias",))
SGD = Optimizer("sgd", lr=0.5)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}, SGD),
    "momentum": (torch.optim.SGD, {"lr": 0.25, "momentum": 0.75}, Optimizer("momentum", lr=0.25, momentum=0.75)),
    "adam": (torch.optim.Adam, {"lr": 2.0**-5, "eps": 2.0**-12, "betas": (0.875, 0.96875)},
             Optimizer("adam", lr=2.0**-5, eps=2.0**-12)),
}  # fmt: skip


def every(period: int) -> Semantics:
    return Semantics(staleness=Staleness(period=period))


def case_of(windows: Windows, optimizer: Optimizer = SGD) -> Case:
    accumulation = max(len(rank) for window in windows for rank in window)
    return Case("local", MLP, windows, Layout(len(windows[0])), optimizer, DOUBLE, max(1, accumulation))


@st.composite
def windows(draw: st.DrawFn, tokens: st.SearchStrategy[int], ranks: int = 3, updates: int = 4) -> Windows:
    """Windows of one row per worker."""
    return tuple(tuple(((draw(tokens),),) for _ in range(ranks)) for _ in range(updates))


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-12) for name in one)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def workers(case: Case, semantics: Semantics) -> tuple[Expectation, ...]:
    return trajectory(case, semantics).workers


# ---------------------------------------------------------------------------------------------- the reference


@given(windows(st.just(5)))
def test_averaging_after_every_step_is_synchronous_sgd_where_tokens_are_equal(drawn: Windows) -> None:
    """Steps of plain SGD are linear in the gradient, so that a mean of weights is a step with the mean gradient."""
    case = case_of(drawn)
    together = trajectory(case, Semantics())
    for worker in workers(case, every(1)):
        assert all(map(close, worker.weights, together.weights))


@given(windows(st.integers(1, 8)))
def test_averaging_after_every_step_divides_by_each_ranks_own_tokens(drawn: Windows) -> None:
    """With unequal tokens it is another rule of synchronous training, and not that of one device."""
    case = case_of(drawn)
    own = trajectory(case, Semantics(denominator="rank"))
    assert all(map(close, workers(case, every(1))[0].weights, own.weights))


def test_averages_are_synchronous_training_as_long_as_the_optimizer_is_linear() -> None:
    """Momentum, each worker's own, is; Adam is not."""
    drawn = tuple(tuple(((5,),) for _ in range(3)) for _ in range(4))
    agree = {
        name: close(
            workers(case_of(drawn, optimizer), every(1))[0].weights[-1],
            trajectory(case_of(drawn, optimizer), Semantics()).weights[-1],
        )
        for name, (_, _, optimizer) in OPTIMIZERS.items()
    }
    assert agree == {"sgd": True, "momentum": True, "adam": False}


def trained_apart(case: Case, period: int, kind: str) -> list[list[dict[str, Tensor]]]:
    """Weights by worker and update, from plain modules and optimizers of torch in one process."""
    modules = [build(case)[0] for _ in range(case.layout.dp)]
    make, options, _ = OPTIMIZERS[kind]
    optimizers = [make(module.parameters(), **options) for module in modules]
    found = [[weights_of(module)] for module in modules]
    for update in range(case.updates):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            step_alone(case, update, rank, module, optimizer)
        if (update + 1) % period == 0:
            average(modules)
        for own, module in zip(found, modules, strict=True):
            own.append(weights_of(module))
    return found


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def step_alone(case: Case, update: int, rank: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batches = window_of(case, update, rank).microbatches
    total = sum(batch.tokens for batch in batches)
    optimizer.zero_grad()
    for batch in batches if total else ():
        arrays = (torch.from_numpy(a) for a in (batch.inputs, batch.targets, batch.valid, batch.ids))
        (module(*arrays, batch.conditional)["main"] / total).backward()
    if total:
        optimizer.step()


def average(modules: list[nn.Module]) -> None:
    with torch.no_grad():
        for copies in zip(*(module.parameters() for module in modules), strict=True):
            mean = torch.stack(list(copies)).mean(dim=0)
            for copy in copies:
                copy.copy_(mean)


@settings(max_examples=15)
@given(windows(st.integers(0, 8), updates=5), st.integers(1, 3), st.sampled_from(sorted(OPTIMIZERS)))
def test_the_reference_trains_as_workers_of_plain_torch_do(drawn: Windows, period: int, kind: str) -> None:
    """Idle workers, too: they make no step, but take part in the average."""
    case = case_of(drawn, OPTIMIZERS[kind][2])
    apart = trained_apart(case, period, kind)
    for worker, own in zip(workers(case, every(period)), apart, strict=True):
        assert all(map(close, worker.weights, own))


@given(windows(st.integers(0, 8)), st.integers(1, 4))
def test_workers_agree_after_an_average_and_count_their_own_steps(drawn: Windows, period: int) -> None:
    case = case_of(drawn)
    found = workers(case, every(period))
    for update in range(case.updates):
        if local.averaged_after(every(period), update):
            assert all(same(w.weights[update + 1], found[0].weights[update + 1]) for w in found)
    for rank, worker in enumerate(found):
        own = [sum(window[rank][0]) > 0 for window in drawn]
        assert [step.steps for step in worker.steps] == [sum(own[:u]) for u in range(case.updates)]
        assert [step.skipped for step in worker.steps] == [not made for made in own]


def test_others_data_reaches_a_worker_with_the_first_average_and_no_earlier() -> None:
    plain = (((5,),), ((7,),), ((2,),))
    other = (((5,),), ((1,),), ((2,),))
    one, two = (workers(case_of((plain, plain, plain)), every(2)), workers(case_of((other, plain, plain)), every(2)))
    assert same(one[0].weights[1], two[0].weights[1]) and not close(one[0].weights[2], two[0].weights[2])


def test_a_worker_is_fed_its_own_samples_under_the_numbers_that_they_have_in_the_whole_case() -> None:
    """The record shows numbers of samples; they must not depend on who looks at it."""
    whole = THREE_WORKERS
    by_worker = [rows_of(alone, 1).ids.tolist() for alone in local.workers_of(whole, every(2))]
    assert [i for ids in by_worker for i in ids] == rows_of(whole, 1).ids.tolist()
    assert [alone.tokens(1) for alone in local.workers_of(whole, every(2))] == [2, 14, 3]


def test_there_is_no_worker_beyond_the_data_ranks() -> None:
    with pytest.raises(CaseError, match="worker must be one of 3 ranks"):
        validate(THREE_WORKERS.replace(worker=3))


# ---------------------------------------------------------------------------------------------- the judge, on real ranks


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(3, deadline=120.0)) as standing:
        yield standing


def run_of(name: str, case: Case) -> Run:
    spec, strategy = next((spec, s) for spec in BUILTIN for s in claims_of(spec).strategies if s.name == name)
    return Run("update", spec, strategy, case)


def recorded(pools: Pools, name: str, case: Case) -> Record:
    result = certify(pools, run_of(name, case), confirm=False)
    assert result.verdict is Verdict.PASS, result.explanation
    return result.records[0]


def first_difference(run: Run, record: Record) -> tuple[str, int] | None:
    first = judge_update(run, record).first
    return None if first is None else (first.quantity, first.update)


def test_claims_of_other_periods_are_rejected_in_the_first_window_that_tells(pools: Pools) -> None:
    """Averages after every second and after every third window part after the second."""
    two, three = run_of("local-sgd", THREE_WORKERS), run_of("local-sgd-every-3", THREE_WORKERS)
    assert first_difference(three, recorded(pools, "local-sgd", THREE_WORKERS)) == ("weight update", 1)
    assert first_difference(two, recorded(pools, "local-sgd-every-3", THREE_WORKERS)) == ("weight update", 1)


def test_synchronous_training_is_not_local_and_local_is_not_synchronous(pools: Pools) -> None:
    record = recorded(pools, "dp", THREE_WORKERS)
    assert first_difference(run_of("local-sgd", THREE_WORKERS), record) == ("tokens", 0)
    record = recorded(pools, "local-sgd", THREE_WORKERS)
    assert first_difference(run_of("dp", THREE_WORKERS), record) == ("tokens", 0)


def test_torchs_optimizer_and_the_textbook_make_the_same_updates_up_to_the_order_of_a_sum(pools: Pools) -> None:
    """The one divides before the sum, the other after it."""
    records = [recorded(pools, name, IDLE_WORKER) for name in ("local-sgd", "post-local-sgd")]
    for one, other in zip(*(list(record.of("weight")) for record in records), strict=True):
        assert (one.rank, one.name, one.update) == (other.rank, other.name, other.update)
        assert np.allclose(one.array, other.array, rtol=1e-4, atol=1e-6)


def test_a_failure_names_the_worker(pools: Pools) -> None:
    record = recorded(pools, "local-sgd", WITH_MOMENTUM)
    at = next(o for o in record.of("weight") if (o.rank, o.update, o.name) == (2, 1, "layers.0.weight"))
    wrong = dataclasses.replace(at, array=at.array * np.float32(1.5))
    changed = [wrong if o is at else o for o in record.observations]
    result = judge_update(run_of("local-sgd", WITH_MOMENTUM), dataclasses.replace(record, observations=changed))
    assert result.first is not None and result.first.name == "worker 2: layers.0.weight"
    assert (result.first.quantity, result.first.update) == ("weight update", 0)


@pytest.mark.parametrize("name", ["local-sgd", "post-local-sgd"])
def test_nothing_is_missing_in_a_record_with_idle_workers(pools: Pools, name: str) -> None:
    """Neither the samples of a worker that made no step, nor its gradients."""
    run = run_of(name, IDLE_WORKER)
    assert form_problems(IDLE_WORKER, run.strategy, recorded(pools, name, IDLE_WORKER)) == []


def test_a_worker_that_shows_nothing_is_missed(pools: Pools) -> None:
    record = recorded(pools, "local-sgd", THREE_WORKERS)
    kept = [o for o in record.observations if o.rank != 1]
    result = judge_update(run_of("local-sgd", THREE_WORKERS), dataclasses.replace(record, observations=kept))
    assert result.verdict is Verdict.FAIL
    assert result.first is not None and result.first.name.startswith("worker 1: ")


def test_a_case_without_an_average_cannot_tell(pools: Pools) -> None:
    """A claim that is wide enough to run it gets no certificate for it."""
    short = THREE_WORKERS.replace(windows=THREE_WORKERS.windows[:2])
    record = recorded(pools, "local-sgd", short)
    start = [o for o in record.observations if o.update == 0 or (o.kind in ENTERING and o.update == 1)]
    run = run_of("local-sgd", short.replace(windows=short.windows[:1]))
    result = judge_update(run, dataclasses.replace(record, observations=start))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.first is not None and result.first.detail == "no averaging within 1 updates"


ENTERING = ("weight", "state", "step", "cursor", "random_state", "loss_scale")


def test_the_radius_of_a_worker_is_its_own() -> None:
    """What is allowed is derived for each worker, from its rows and precision, and from the averages."""
    found = expect(THREE_WORKERS, every(2))
    radii = [worker.radius[0]["layers.0.weight"] for worker in found.workers]
    assert len(set(radii)) == 3 and all(radius > 0 for radius in radii)
    assert all(worker.trajectory_radius["layers.0.weight"] > 0 for worker in found.workers)
