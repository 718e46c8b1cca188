"""Mutants of gradient synchronization: when it runs, over what, and what its hooks and gathers do."""

# No postponed annotations here: torch compares those of communication hooks with its own types.

from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from equivtests.adapters.native.ddp import DDP
from equivtests.adapters.textbook.collectives import all_reduce
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.pairs import Gather
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms
from equivtests.mutants.mutant import mutant
from equivtests.mutants.parents import (
    LocalPairs,
    LoggedApart,
    ModuleByModule,
    ReplicatedSum,
    SummedPairs,
    TwoTermCompression,
)
from equivtests.mutants.situations import (
    EARLY_BRANCH,
    LARGE_GRADIENTS,
    PAIRS,
    RUNNING,
    TWO_BY_THREE,
    TWO_BY_THREE_GPT,
    TWO_BY_THREE_MLP,
    UNUSED_ONCE,
)

# ---------------------------------------------------------------------------------------------- when and what


@mutant(
    "ddp-static-nosync",
    strategy="dp",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="pytorch/pytorch#187732; huggingface/accelerate#3679",
    mistake="gradients are reduced in the first update only",
)
class ReducedOnce(DataParallel):
    """From the second update on, every rank keeps its own gradients."""

    def reduce_gradients(self, gradients: list[Tensor]) -> None:
        if self.steps == 0:
            super().reduce_gradients(gradients)


@mutant(
    "ddp-static-manual",
    strategy="dp",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="Lightning-AI/pytorch-lightning#18086, #20704",
    mistake="the reduction of the first update is never queued",
)
class FirstNotReduced(DataParallel):
    """Only the first update keeps local gradients."""

    def reduce_gradients(self, gradients: list[Tensor]) -> None:
        if self.steps > 0:
            super().reduce_gradients(gradients)


@mutant(
    "ddp-unused-accum",
    strategy="dp",
    case=EARLY_BRANCH,
    quantity="gradient",
    source="pytorch/pytorch#69031",
    mistake="parameters that the last micro-batch does not use are not reduced",
)
class LastMicroBatchOnly(DataParallel):
    """The set of used parameters is that of the last backward pass alone."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self.touched: set[Tensor] = set()
        for parameter in module.parameters():
            parameter.register_hook(lambda _, p=parameter: self.touched.add(p))
        return super().wrap(module)

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.touched.clear()
        return super().forward_backward(k, batch, last)

    def reduce_gradients(self, gradients: list[Tensor]) -> None:
        super().reduce_gradients([p.grad for _, p in self.trainable() if p in self.touched and p.grad is not None])


@mutant(
    "ddp-toggle-late",
    strategy="ddp-no-sync",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="karpathy/build-nanogpt#30",
    mistake="require_backward_grad_sync is set between forward and backward",
)
class ToggledLate(DDP):
    """The forward pass has already armed the reducer with the flag of the micro-batch before."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        objective = self.objective(self.forward(self.model, batch), k, batch)
        self.model.require_backward_grad_sync = last
        self.backward(objective)
        return objective


@mutant(
    "ddp-boundary-off-by-one",
    strategy="ddp-no-sync",
    case=TWO_BY_THREE_GPT,
    quantity="gradient",
    source="modelscope/FunASR#3472",
    mistake="the first micro-batch of a window is synchronized instead of the last: i % K for (i + 1) % K",
)
class SynchronizesFirst(DDP):
    """Later micro-batches are added to the reduced gradient without being reduced."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        return super().forward_backward(k, batch, last=k % self.case.accumulation == 0)


@mutant(
    "speechbrain-break",
    strategy="dp",
    case=TWO_BY_THREE_GPT,
    quantity="gradient",
    source="speechbrain/speechbrain#2010",
    mistake="the loop over modules breaks at the first one that has nothing to synchronize",
)
class LeavesLoop(ModuleByModule):
    """`break` where `continue` is meant: modules after a bare one keep local gradients."""

    def held(self) -> list[list[Tensor]]:
        return list(takewhile(bool, self.by_module()))


@mutant(
    "accelerate-sync-flag",
    strategy="dp",
    case=TWO_BY_THREE_MLP,
    quantity="loss",
    source="huggingface/accelerate#2790, #1624, #2831",
    mistake="the optimizer steps whenever gradients were reduced: K steps in one window",
)
class StepsWhenReduced(DataParallel):
    """One flag means both reduce and step, so reducing after every micro-batch also steps after every one."""

    def after_backward(self, k: int) -> None:
        if k + 1 < self.counts.microbatches:
            self.finish_gradients()
            self.step_everything()
            self.optimizer.zero_grad()


@mutant(
    "ddp-unused-first-step",
    strategy="ddp-find-unused",
    case=UNUSED_ONCE,
    quantity="gradient",
    source="pytorch/pytorch#79171, #97030",
    mistake="default flags with an unused parameter: the first backward pass leaves local gradients, without an error",
)
class UnusedNotDeclared(DDP):
    """The bucket that waits for the unused parameter never completes; only the next forward pass would complain."""

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(module)


@mutant(
    "ddp-bypass-forward",
    strategy="ddp",
    case=TWO_BY_THREE,
    quantity="gradient",
    source="pytorch/pytorch#109774; modelscope/ms-swift#10165",
    mistake="calls the inner module, past the wrapper whose forward pass arms the reduction",
)
class BypassesWrapper(DDP):
    """`ddp.module(x)` computes the right loss and keeps local gradients."""

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        return super().forward(self.model.module, batch)


# ---------------------------------------------------------------------------------------------- buffers


@mutant(
    "ddp-buffer-reassign",
    strategy="dp",
    case=RUNNING,
    quantity="buffer",
    source="pytorch/pytorch#63916",
    mistake="a buffer that the model assigns anew is no longer synchronized: the wrapper holds the old tensor",
)
class StaleBuffer(DataParallel):
    """What is broadcast is the tensor that was the buffer when the model was wrapped."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self.known = module.get_buffer("running.mean")
        return super().wrap(module)

    def reduce_buffers(self) -> None:
        running: Any = self.module.running
        running.mean = running.mean.clone()
        running.commit(running.total, running.count)
        dist.broadcast(self.known, 0)


@mutant(
    "bn-rank0-stats",
    strategy="dp",
    case=RUNNING,
    quantity="buffer",
    source="facebookresearch/fairscale#68; pytorch/pytorch#110363",
    mistake="running statistics are broadcast from rank 0 instead of being averaged over ranks",
)
class RankZeroStatistics(DataParallel):
    """Every rank ends with the running mean of rank 0's rows."""

    def reduce_buffers(self) -> None:
        running: Any = self.module.running
        running.commit(running.total, running.count)
        dist.broadcast(running.mean, 0)


# ---------------------------------------------------------------------------------------------- hooks


@mutant(
    "powersgd-key",
    strategy="dp",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="pytorch/pytorch#48670, #49418",
    mistake="residuals are kept by the position of their bucket, and buckets are put into another order",
)
class KeyedByPosition(TwoTermCompression):
    """After the buckets are rebuilt, a residual is added to another bucket than it was taken from."""

    def key(self, position: int, bucket: int) -> int:
        return position


def sum_in_half(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """A gradient hook that adds up in float16 and divides by W afterwards."""
    half = bucket.buffer().to(torch.float16)
    world = dist.get_world_size()
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda f: bucket.buffer().copy_(f.value()[0]).div_(world))


@mutant(
    "fp16-hook-overflow",
    strategy="ddp-fp16-hook",
    case=LARGE_GRADIENTS,
    quantity="gradient",
    source="pytorch/pytorch#59522, #59576",
    mistake="half-precision gradients are added up before they are divided by W, and overflow",
)
class DividesAfterSum(DDP):
    """The division comes after the reduction; each rank's gradient fits float16, their sum does not."""

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        model = DistributedDataParallel(module)
        model.register_comm_hook(None, sum_in_half)
        return model


def sum_only(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """A gradient hook that leaves out the division by W."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


@mutant(
    "hook-no-division",
    strategy="ddp-no-sync",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="facebookresearch/fairseq#494",
    mistake="a communication hook forgets that it replaces the average, too",
)
class HookWithoutDivision(DDP):
    """Gradients are summed over ranks."""

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        model = super().wrap(module)
        model.register_comm_hook(None, sum_only)
        return model


# ---------------------------------------------------------------------------------------------- losses over ranks


@mutant(
    "gather-with-grad",
    strategy="dp",
    case=PAIRS,
    quantity="gradient",
    source="mlfoundations/open_clip#616; JohnGiorgi/DeCLUTR#212",
    mistake="a loss that every rank holds whole is multiplied by W like a local part",
)
class ReplicatedLossTimesW(LoggedApart):
    """The gather's backward pass already adds the copies of all ranks, so the pairs count W times."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        copies = self.ranks.world - 1
        return super().differentiated(terms, k, batch) + copies * self.pair_term(terms["pairs"])


class OwnSlice(Gather):
    """A gather whose backward pass takes the own rows of the own gradient, without the sum over ranks."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        start = sum(ctx.counts[: ctx.rank])
        return gradients[0][start : start + ctx.counts[ctx.rank]], None, None


@mutant(
    "gatherlayer-own-slice",
    strategy="dp",
    case=PAIRS,
    quantity="gradient",
    source="lightly-ai/lightly#1531; pytorch/pytorch#120386",
    mistake="the gather's backward pass returns the local slice only: cross terms of other ranks' losses are missing",
)
class GatherOwnSlice(LocalPairs):
    """What the other ranks' losses say about this rank's samples is dropped."""

    gather = OwnSlice


class SumWithSummedGradient(ReplicatedSum):
    """A sum over ranks whose backward pass sums again."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].clone()) * ctx.world, None


@mutant(
    "jax-psum-grad",
    strategy="dp",
    case=PAIRS,
    quantity="gradient",
    source="jax-ml/jax#3970",
    mistake="the gradient through a sum over ranks is summed over ranks again, although all of them hold it whole",
)
class SumTransposedAsSum(SummedPairs):
    """The loss is right; its gradient through the sum is W times too large."""

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return SumWithSummedGradient.apply(x, self.ranks.world)
