"""The delayed update of an offloaded optimizer: its recursion, and that it does not matter when the host is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from equivtests.adapters.textbook.delayed_offload import DelayedOffload
from equivtests.cases.case import DOUBLE, Case, Layout, Model, Optimizer, Semantics
from equivtests.cases.staleness import Staleness
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Run
from equivtests.chapters.update import judge_update
from equivtests.judge.check import Verdict
from equivtests.mutants.delayed import FALLING, WITH_GAP
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Observe, Record
from equivtests.reference import update as one
from equivtests.reference import versions
from equivtests.reference.expectation import canonical_weights, trajectory

LATE = Semantics(staleness=Staleness(delay=1))
MOVING = Optimizer("momentum", lr=0.25, momentum=0.75, schedule=(1.0, 0.5, 0.25))
CASE = Case(
    "delayed", Model("mlp", width=4, depth=2, features=("bias",)),
    tuple((((n, 3),),) for n in (8, 2, 5, 7, 1)), Layout(1), MOVING, DOUBLE,
)  # fmt: skip


def test_the_reference_steps_with_the_gradient_of_the_window_before() -> None:
    """W(u+1) = W(u) - rate · (momentum of g(u-1)), g(u-1) at W(u-1); written out with one tensor of all weights."""
    names = list(canonical_weights(CASE))
    weights, momentum, made = [canonical_weights(CASE)], {n: torch.zeros(()).double() for n in names}, 0
    for update in range(CASE.updates):
        entering = dict(weights[-1])
        if update > 0:
            late = one.gradients(CASE, Semantics(), update - 1, update - 1, weights[update - 1]).values
            momentum = {n: 0.75 * momentum[n] + late[n] for n in names}
            entering = {n: entering[n] - MOVING.rate(made) * momentum[n] for n in names}
            made += 1
        weights.append(entering)
    found = trajectory(CASE, LATE)
    assert [step.applies for step in found.steps] == [None, 0, 1, 2, 3]
    for mine, its in zip(weights, found.weights, strict=True):
        assert all(torch.allclose(mine[n], its[n], rtol=1e-12, atol=1e-14) for n in names)


def test_a_window_sees_the_updates_that_were_made_when_it_entered() -> None:
    """One fewer than on one device from the second window on; a window without tokens makes no update, one window later."""
    used = [versions.used(CASE, LATE.staleness, window)[0].forward for window in range(CASE.updates)]
    assert used == [0, 0, 1, 2, 3]
    assert [versions.used(WITH_GAP, LATE.staleness, window)[0].forward for window in (0, 2, 3)] == [0, 1, 1]
    assert [step.applies for step in trajectory(WITH_GAP, LATE).steps] == [None, 0, None, 2]


# ---------------------------------------------------------------------------------------------- the host's thread


class HostFirst(DelayedOffload):
    """The host is done before the device begins."""

    def begin_step(self, observe: Observe) -> None:
        super().begin_step(observe)
        if self.stepping:
            self.stepped.result()


class HostLast(DelayedOffload):
    """The host begins when the device is done."""

    def begin_step(self, observe: Observe) -> None:
        self.stepping = bool(self.waiting)
        if self.stepping:
            self.show_rate(observe)
            self.give_gradients()

    def end_step(self) -> None:
        if self.stepping:
            self.stepped = self.host.submit(self.step_on_host)
        super().end_step()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(2, deadline=120.0)) as standing:
        yield standing


def recorded(pools: Pools, adapter: type[DelayedOffload], case: Case) -> tuple[Run, Record]:
    spec = f"{adapter.__module__}:{adapter.__name__}"
    run = Run("update", spec, claims_of(spec).strategies[0], case)
    result = certify(pools, run, confirm=False)
    assert result.verdict is Verdict.PASS, result.explanation
    return run, result.records[0]


@pytest.mark.parametrize("adapter", [HostFirst, HostLast])
def test_when_the_host_steps_changes_no_bit(pools: Pools, adapter: type[DelayedOffload]) -> None:
    """Nothing that the device computes with is written while it does, nor the other way round."""
    usual, other = (recorded(pools, cls, FALLING)[1] for cls in (DelayedOffload, adapter))
    assert len(usual.observations) == len(other.observations)
    key = ("kind", "name", "rank", "update", "microbatch")
    ordered = [sorted(r.observations, key=lambda o: str([getattr(o, k) for k in key])) for r in (usual, other)]
    for a, b in zip(*ordered, strict=True):
        assert np.array_equal(a.array, b.array), (a.kind, a.name, a.update)


def test_without_delay_the_same_record_is_not_that_of_one_device(pools: Pools) -> None:
    """Update 0 makes no step, where one device makes one."""
    _, record = recorded(pools, DelayedOffload, FALLING)
    spec = "equivtests.adapters.textbook.offload:Offload"
    first = judge_update(Run("update", spec, claims_of(spec).strategies[0], FALLING), record).first
    assert first is not None and (first.quantity, first.update) == ("learning rate", 0)
