"""Mutants of local SGD: what is averaged, when, and what stays each worker's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from equivtests.adapters.native.local_sgd import PostLocalSGD
from equivtests.adapters.textbook.collectives import all_gather, all_reduce
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.local_sgd import LocalSGD
from equivtests.adapters.torch_adapter import Counts, TorchAdapter
from equivtests.cases.case import Model, Optimizer, Windows
from equivtests.cases.grid import ADAMW, MOMENTUM
from equivtests.cases.windows import Window
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import IDLE_RANK, TINY_MLP, situation

FOUR_WINDOWS: Windows = (
    (((8, 3),), ((5,),), ((1, 1),)),
    (((2,),), ((7, 7),), ((3,),)),
    (((6,),), ((1, 8),), ((4, 2),)),
    (((3,), (5,)), ((2,),), ((8,),)),
)
IDLE: Windows = (FOUR_WINDOWS[0], (((2,),), ((0,),), ((3,),)), FOUR_WINDOWS[2])

THREE_WORKERS = situation("three-workers", TINY_MLP, FOUR_WINDOWS)
WITH_MOMENTUM = situation("three-workers-momentum", TINY_MLP, FOUR_WINDOWS, MOMENTUM)
IDLE_WORKER = situation("idle-worker", Model("gpt", depth=1, features=("bias",)), IDLE, ADAMW)
SCHEDULED = situation(
    "three-workers-schedule", TINY_MLP, FOUR_WINDOWS, Optimizer("sgd", lr=0.5, schedule=(1.0, 0.75, 0.5, 0.25))
)


# ---------------------------------------------------------------------------------------------- the average


@mutant(
    "localsgd-scaler",
    strategy="local-sgd",
    case=IDLE_RANK,
    quantity="weight update",
    source="pytorch/pytorch#76282",
    mistake="weights are averaged inside the guarded step: a worker that skips its step keeps its own",
)
class AveragesInsideGuard(LocalSGD):
    """Skipping the step skips the averaging too, and the workers drift apart."""

    def take_over(self, averages: list[Tensor]) -> None:
        if self.counts.tokens.sum() > 0:
            super().take_over(averages)


@mutant(
    "local-average-first",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="weight update",
    source="constructed: Stich 2019, algorithm 1, averages the stepped weights",
    mistake="weights are averaged before the step instead of after it",
)
class AveragesFirst(LocalSGD):
    """The workers' last steps are not averaged."""

    def step_everything(self) -> None:
        super().after_window(self.window.update)
        super().step_everything()

    def after_window(self, update: int) -> None:
        pass


@mutant(
    "local-left-out",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="weight update",
    source="constructed: a worker that joins late has no part in the average",
    mistake="the last worker has no part in the average, which it takes over",
)
class LeavesOneOut(LocalSGD):
    """The mean is over the other workers."""

    def average(self, bucket: Tensor) -> Tensor:
        others = self.ranks.world - 1
        return all_reduce(bucket * float(self.ranks.rank < others)).div_(others)


@mutant(
    "local-sum",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="weight update",
    source="constructed: an all-reduce whose sum is taken for the mean",
    mistake="the workers' weights are added up and not divided",
)
class AddsUp(LocalSGD):
    """An all-reduce without the division."""

    def average(self, bucket: Tensor) -> Tensor:
        return all_reduce(bucket)


@mutant(
    "local-by-tokens",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="weight update",
    source="constructed: the rule of McMahan et al. 2017, algorithm 1, where another one is declared",
    mistake="the average is weighted by each worker's valid tokens in the last window",
)
class WeighsByTokens(LocalSGD):
    """Weights n_k / n, as federated averaging has them, where equal ones are declared."""

    def average(self, bucket: Tensor) -> Tensor:
        own = bucket.new_tensor(float(self.counts.tokens.sum()))
        return all_reduce(bucket * own).div_(all_reduce(own.clone()))


@mutant(
    "local-phase",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="weight update",
    source="constructed: windows counted from 0",
    mistake="windows are counted from 0, so that the first one is averaged, and the second is not",
)
class OnePeriodOff(LocalSGD):
    """Averages after windows 0, 2, 4, …"""

    def due(self, update: int) -> bool:
        return super().due(update + 1)


@mutant(
    "local-order",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="weight update",
    source="constructed: averages that every worker computes for itself",
    mistake="each worker adds up the weights in an order of its own, so that the averages differ in their last bits",
)
class OrderOfItsOwn(LocalSGD):
    """Every average is right up to rounding, but the workers do not go on from the same weights."""

    def average(self, bucket: Tensor) -> Tensor:
        everyone = all_gather(bucket).view(self.ranks.world, -1).roll(-self.ranks.rank, dims=0)
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        return total.div_(self.ranks.world)


# ---------------------------------------------------------------------------------------------- what stays a worker's own


@mutant(
    "local-averages-state",
    strategy="local-sgd",
    case=WITH_MOMENTUM,
    quantity="optimizer state",
    source="constructed: the rule of algorithms that average momentum, where another one is declared",
    mistake="momentum is averaged along with the weights",
)
class AveragesState(LocalSGD):
    """All workers go on with the same momentum."""

    def average_weights(self) -> None:
        super().average_weights()
        held = [state for _, state, _ in self.optimizer_state()]
        for state, average in zip(held, self.averages(held), strict=True):
            state.copy_(average)


@mutant(
    "local-forgets-state",
    strategy="local-sgd",
    case=WITH_MOMENTUM,
    quantity="optimizer state",
    source="constructed: an optimizer that is built anew when weights are replaced",
    mistake="a new optimizer is made after every averaging: momentum is lost",
)
class ForgetsState(LocalSGD):
    """The optimizer starts afresh from the averaged weights."""

    def average_weights(self) -> None:
        super().average_weights()
        self.optimizer.state.clear()


@mutant(
    "local-shared-step",
    strategy="local-sgd",
    case=IDLE_WORKER,
    quantity="step",
    source="constructed: a step counter of the job instead of the worker",
    mistake="a worker that skips a window counts it as a step, since the others made one",
)
class SharesStep(LocalSGD):
    """Step counters are the same on all workers."""

    def after_window(self, update: int) -> None:
        super().after_window(update)
        if self.counts.tokens.sum() == 0:
            self.steps += 1


@mutant(
    "local-shared-schedule",
    strategy="local-sgd",
    case=IDLE_WORKER,
    quantity="learning rate",
    source="constructed: a scheduler that is stepped although the optimizer's step was skipped",
    mistake="the learning-rate schedule moves on in windows in which the worker made no step",
)
class SharesSchedule(LocalSGD):
    """The rate follows windows instead of the worker's steps."""

    def after_window(self, update: int) -> None:
        super().after_window(update)
        if self.counts.tokens.sum() == 0:
            self.step_scheduler()


@mutant(
    "local-still-reduces",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="gradient",
    source="constructed: DDP left around the model, whose hooks go on reducing gradients",
    mistake="gradients are averaged over workers as well",
)
class StillReduces(LocalSGD):
    """Synchronous training that calls itself local."""

    def synchronize(self) -> None:
        DataParallel.synchronize(self)


@mutant(
    "local-counts-all-tokens",
    strategy="local-sgd",
    case=THREE_WORKERS,
    quantity="tokens",
    source="constructed: a token count that is still reduced over all ranks",
    mistake="each worker divides by the tokens of all workers",
)
class CountsAllTokens(LocalSGD):
    """The loss is divided by the window's tokens."""

    def count(self, window: Window) -> Counts:
        return TorchAdapter.count(self, window)


# ---------------------------------------------------------------------------------------------- checkpoints


@mutant(
    "local-one-checkpoint",
    strategy="local-sgd",
    case=THREE_WORKERS.replace(windows=FOUR_WINDOWS[:3]),
    quantity="restored layout",
    source="constructed: checkpoints that rank 0 writes for all",
    mistake="every worker goes on with the checkpoint of worker 0",
    chapter="restore",
)
class LoadsWorkerZero(LocalSGD):
    """Between two averages the workers' weights differ, and only those of worker 0 survive."""

    def load(self, directory: Path) -> None:
        TorchAdapter.load(self, directory / "worker-0")


@mutant(
    "local-saves-average",
    strategy="local-sgd",
    case=WITH_MOMENTUM.replace(windows=FOUR_WINDOWS[:3]),
    quantity="restored weights",
    source="constructed: a checkpoint of the average model, which is to be deployed",
    mistake="the checkpoint holds the average of the workers' weights, though none was due",
    chapter="restore",
)
class SavesAverage(LocalSGD):
    """What is saved is the mean over workers."""

    def tensors(self) -> dict[str, Tensor]:
        own = super().tensors()
        return dict(zip(own, self.averages(list(own.values())), strict=True))


# ---------------------------------------------------------------------------------------------- torch's own


@mutant(
    "post-local-warm-up",
    strategy="post-local-sgd",
    case=THREE_WORKERS,
    quantity="weight update",
    source="torch.distributed.algorithms.model_averaging: PeriodicModelAverager counts its calls from 0",
    mistake="without warm-up the averager averages in its first call, one window early",
)
class NoWarmUp(PostLocalSGD):
    """Averages after windows 0, 2, 4, …"""

    def warmup_steps(self) -> int:
        return 0


@mutant(
    "post-local-old-groups",
    strategy="post-local-sgd",
    case=SCHEDULED,
    quantity="weight update",
    source="torch 2.13.0, PostLocalSGDOptimizer.load_state_dict; NVIDIA/apex#766 is the same in another wrapper",
    mistake="after loading, the schedule sets the rate of groups that the inner optimizer no longer has",
    chapter="restore",
)
class KeepsOldGroups(PostLocalSGD):
    """load_state_dict as torch has it."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(saved)
