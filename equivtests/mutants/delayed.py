"""Mutants of a delayed update: which gradient is applied when, and what it waits with."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from equivtests.adapters.context import Ranks
from equivtests.adapters.textbook.delayed_offload import DelayedOffload
from equivtests.adapters.textbook.offload import Offload
from equivtests.cases.case import Case, Model, Optimizer, Windows
from equivtests.cases.grid import MOMENTUM
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import TINY_MLP, situation
from equivtests.record.observation import Observe

WINDOWS: Windows = (
    (((8, 3), (2,)), ((5,), (6, 1))),
    (((2,), (4, 4)), ((7, 7), (3,))),
    (((6,), (1,)), ((1, 8), (5,))),
    (((3,), (5,)), ((2,), (8, 2))),
)
GAP: Windows = (WINDOWS[0], (((0,),), ((0,),)), *WINDOWS[1:3])

FOUR_UPDATES = situation("four-updates", TINY_MLP, WINDOWS, MOMENTUM)
WITH_GAP = situation("window-empty-between", TINY_MLP, GAP, MOMENTUM)
CLIPPED = situation("four-updates-clipped", TINY_MLP, WINDOWS, Optimizer("sgd", lr=0.5, clip=0.25))
FALLING = situation(
    "four-updates-falling", Model("gpt", depth=1, features=("bias",)), WINDOWS,
    Optimizer("adamw", lr=2.0**-6, weight_decay=0.125, eps=2.0**-12, schedule=(1.0, 0.75, 0.5, 0.25)),
)  # fmt: skip


@mutant(
    "delayed-not-at-all",
    strategy="offload-delayed",
    case=FOUR_UPDATES,
    quantity="weight update",
    source="constructed: Ren et al. 2021, section 5.2, steps one update later",
    mistake="the host steps at once, which is another algorithm than the declared one",
)
class NotDelayed(DelayedOffload):
    """Every gradient is applied in the update that it was computed in."""

    def end_step(self) -> None:
        """All is done at the end of the window."""

    def keep_gradients(self) -> None:
        Offload.step_everything(self)
        self.stream.draw -= 1  # `advance` has moved it


@mutant(
    "delayed-by-two",
    strategy="offload-delayed",
    case=FOUR_UPDATES,
    quantity="learning rate",
    source="constructed: a queue with one place too many",
    mistake="a gradient is applied two updates later",
)
class DelayedByTwo(DelayedOffload):
    """Two gradients wait: update 1 makes no step, either."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.queued: dict[str, Tensor] = {}

    def keep_gradients(self) -> None:
        super().keep_gradients()
        self.waiting, self.queued = self.queued, self.waiting


@mutant(
    "delayed-twice",
    strategy="offload-delayed",
    case=WITH_GAP,
    quantity="weight update",
    source="constructed: a buffer that is read again because nothing new was written to it",
    mistake="after an empty window the gradient that was applied last is applied again",
)
class AppliedTwice(DelayedOffload):
    """What waits is only replaced by something newer."""

    def keep_gradients(self) -> None:
        held = self.waiting
        super().keep_gradients()
        self.waiting = self.waiting or held

    def give_gradients(self) -> None:
        kept = self.waiting
        super().give_gradients()
        self.waiting = {name: gradient.clone() for name, gradient in kept.items()}


@mutant(
    "delayed-flush",
    strategy="offload-delayed",
    case=FOUR_UPDATES,
    quantity="weight update",
    source="constructed: an epoch's end that leaves nothing waiting",
    mistake="the last update also applies its own gradient",
)
class FlushesAtTheEnd(DelayedOffload):
    """After the last window the gradient that waits is applied, too."""

    def after_window(self, update: int) -> None:
        super().after_window(update)
        if update == self.case.updates - 1:
            self.give_gradients()
            self.step_on_host()
            self.parameters_back()


@mutant(
    "delayed-newest-clip",
    strategy="offload-delayed",
    case=CLIPPED,
    quantity="weight update",
    source="constructed: a coefficient that is read when the step is made",
    mistake="the gradient that waits is clipped by the norm of the newest one",
)
class ClipsByTheNewest(DelayedOffload):
    """Gradients wait unclipped; the step waits for the norm of the window that is passed meanwhile."""

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        norm = self.gradient_norm(order)
        self.newest = self.clip_factor(limit, norm)
        return norm

    def step_on_host(self) -> None:
        """The step is made at the end of the update."""

    def end_step(self) -> None:
        if self.stepping:
            for master in self.masters.values():
                if master.grad is not None:
                    master.grad.mul_(self.newest)
            super().step_on_host()
        super().end_step()


@mutant(
    "delayed-half-new",
    strategy="offload-delayed",
    case=FOUR_UPDATES,
    quantity="loss",
    source="constructed: parameters are copied back as soon as the host has stepped",
    mistake="parameters are copied back while the window is passed: later micro-batches see new ones",
)
class CopiesTooEarly(DelayedOffload):
    """The first micro-batch runs with old weights, the second with new ones."""

    def after_backward(self, k: int) -> None:
        super().after_backward(k)
        if k == 0 and self.stepping:
            self.stepped.result()
            self.parameters_back()


@mutant(
    "delayed-torn",
    strategy="offload-delayed",
    case=FOUR_UPDATES,
    quantity="weight update",
    source="constructed: a copy that does not wait for the host's step",
    mistake="some parameters are copied back before the host has stepped them",
)
class CopiesWithoutWaiting(DelayedOffload):
    """Half of the parameters are those of the update before."""

    def parameters_back(self) -> None:
        before = {p: p.detach().clone() for p in list(self.masters)[::2]}
        super().parameters_back()
        with torch.no_grad():
            for parameter, old in before.items():
                parameter.copy_(old)


@mutant(
    "delayed-schedule",
    strategy="offload-delayed",
    case=FALLING,
    quantity="learning rate",
    source="constructed: a schedule that is stepped in the training loop, window by window",
    mistake="the schedule moves with windows instead of updates made: it is one step ahead",
)
class SchedulesByWindow(DelayedOffload):
    """Update 1 is the first that is made, but has the rate of the second."""

    def advance(self, observe: Observe) -> None:
        super().advance(observe)
        if not self.stepping:
            self.step_scheduler()


@mutant(
    "delayed-lost",
    strategy="offload-delayed",
    case=FOUR_UPDATES,
    quantity="restored schedule",
    source="constructed: a checkpoint of weights and optimizer alone",
    mistake="the gradient that waits is not in the checkpoint: the first update after it makes no step",
    chapter="restore",
)
class LosesWaiting(DelayedOffload):
    """After loading nothing waits."""

    def load_tensors(self, directory: Path) -> None:
        super().load_tensors(directory)
        self.waiting = {}


@mutant(
    "delayed-waits-unclipped",
    strategy="offload-delayed",
    case=CLIPPED,
    quantity="weight update",
    source="constructed: gradients are saved as they were reduced",
    mistake="the gradient that waits is saved as it was before clipping",
    chapter="restore",
)
class SavesUnclipped(DelayedOffload):
    """The checkpoint holds the gradient, but not the coefficient."""

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        norm = super().clip_gradients(limit, order)
        self.coefficient = self.clip_factor(limit, norm)
        return norm

    def save_tensors(self, directory: Path) -> None:
        clipped = self.waiting
        self.waiting = {name: gradient / self.coefficient for name, gradient in clipped.items()}
        super().save_tensors(directory)
        self.waiting = clipped


@mutant(
    "delayed-flushed-checkpoint",
    strategy="offload-delayed",
    case=FOUR_UPDATES,
    quantity="restored step",
    source="constructed: a checkpoint that first applies what waits, though it is declared to be saved",
    mistake="loading applies the gradient that waits, before the window that it was to be applied beside",
    chapter="restore",
)
class AppliesOnLoading(DelayedOffload):
    """Training goes on as if it had been synchronous."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.give_gradients()
        self.step_on_host()
        self.parameters_back()
        self.step_scheduler()
        self.steps += 1
