"""Mutants of sharded optimizers, gradients and weights, and of the overlap that hides their communication."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equivtests.adapters.native.fsdp1 import FSDP1
from equivtests.adapters.native.fsdp2 import FSDP2
from equivtests.adapters.textbook.collectives import reduce_scatter
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.zero import Zero1, Zero2
from equivtests.models.build import load_canonical
from equivtests.mutants.mutant import mutant
from equivtests.mutants.sharding import LateWeights, MainGradients, SecondCopy, TwoBuffers
from equivtests.mutants.situations import (
    BRANCH_UNUSED,
    COPIES_WITHOUT_SHARDS,
    EMPTY_SHARD,
    FOUR_RANKS_MLP,
    LAST_IN_ONE_PASS,
    MIDDLE_SGD,
    OUT_OF_ORDER,
    SHARDS,
    SHARDS_ADAM,
    TWO_BY_THREE_MLP,
    TWO_BY_TWO_MESH,
    VECTORS_WITHOUT_DECAY,
)
from equivtests.record.observation import Observe

# ---------------------------------------------------------------------------------------------- reduction


@mutant(
    "megatron-multi-instance",
    strategy="zero-2",
    case=TWO_BY_TWO_MESH,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#3693, #3670",
    mistake="copies are reduced before the reduction to the shards has finished",
)
class CopiesReducedFirst(Zero2):
    """The all-reduce over copies reads the gradient buffer before the reduce-scatter has written it: partial sums."""

    def add_ranks(self, flat: Tensor) -> Tensor:
        unwritten = flat.view(self.shard_count, -1)[self.shard_index].clone()
        reduce_scatter(flat, self.shard_group)
        return self.reduce_replicas(unwritten)


@mutant(
    "deepspeed-bf16-wrong-buffer",
    strategy="dp",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="deepspeedai/DeepSpeed#5154",
    mistake="gradients are accumulated in one buffer and reduced in another",
)
class EmptiedBuffer(MainGradients):
    """The emptied gradients are reduced; the main ones, which the optimizer takes, are not."""

    def synchronize(self) -> None:
        self.reduce_gradients([torch.zeros_like(p) for _, p in self.trainable()])
        for name, parameter in self.trainable():
            parameter.grad = self.main[name]


@mutant(
    "deepspeed-accum-bf16",
    strategy="zero-2",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="deepspeedai/DeepSpeed#1800, #2352; pytorch/pytorch#194628",
    mistake="micro-batches are accumulated in bfloat16",
)
class RoundedAccumulator(Zero2):
    """The accumulator has the compute dtype, so each micro-batch adds a rounding error of 1/256."""

    def collect(self, flat: Tensor) -> None:
        super().collect(flat)
        self.gradient_shard = self.gradient_shard.bfloat16().to(self.dtype)


@mutant(
    "torch-reduce-dtype",
    strategy="dp",
    case=FOUR_RANKS_MLP,
    quantity="gradient",
    source="pytorch/pytorch#106395",
    mistake="gradients are reduced in bfloat16",
)
class RoundedReduction(DataParallel):
    """The reduction runs in a lower precision than the case declares; the error grows with the world."""

    def average(self, bucket: Tensor) -> Tensor:
        return super().average(bucket.bfloat16()).to(bucket.dtype)


@mutant(
    "deepspeed-pipe-zero-noreduce",
    strategy="zero-1",
    case=LAST_IN_ONE_PASS,
    quantity="gradient",
    source="deepspeedai/DeepSpeed#855",
    mistake="one of two code paths does not reduce gradients",
)
class OnePathUnreduced(Zero1):
    """Windows of a single micro-batch take a path of their own, which forgets the reduction."""

    def reduce(self, flat: Tensor) -> Tensor:
        if self.counts.microbatches > 1:
            return super().reduce(flat)
        return flat.view(self.shard_count, -1)[self.shard_index].clone()


@mutant(
    "deepspeed-overlap-race",
    strategy="dp",
    case=SHARDS,
    quantity="gradient",
    source="deepspeedai/DeepSpeed#4298, #5545, #8061, #7965, #6351",
    mistake="a gradient buffer is filled again while it is still being reduced",
)
class BufferSwappedEarly(TwoBuffers):
    """The buffers are swapped one bucket too early, so a bucket overwrites the one before it."""

    def filled(self, bucket: int) -> int:
        return (bucket + 1) % 2


@mutant(
    "torch-hsdp-divide",
    strategy="zero-2",
    case=TWO_BY_TWO_MESH,
    quantity="gradient",
    source="pytorch/pytorch#155903",
    mistake="the divisor is applied in both stages of the reduction",
)
class DividedTwice(Zero2):
    """The sum over copies is divided by their number, and the result by the whole world again."""

    def reduce_replicas(self, shard: Tensor) -> Tensor:
        return super().reduce_replicas(shard).div_(self.case.layout.replicate)


@mutant(
    "megatron-one-rank-rescale",
    strategy="zero-2",
    case=COPIES_WITHOUT_SHARDS,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#6773",
    mistake="a reduction over one rank rescales the accumulated gradient at every micro-batch",
)
class Rescaled(Zero2):
    """The average is taken in place of the accumulator, which holds the earlier micro-batches as well."""

    def collect(self, flat: Tensor) -> None:
        self.gradient_shard += self.add_ranks(flat)
        self.average(self.gradient_shard)


# ---------------------------------------------------------------------------------------------- weights


@mutant(
    "olmocore-hsdp-init",
    strategy="fsdp2-hsdp",
    case=TWO_BY_TWO_MESH,
    quantity="initial weights",
    source="allenai/OLMo-core#319",
    mistake="ranks initialize from seeds of their own and nothing is broadcast",
)
class OwnSeeds(FSDP2):
    """fully_shard broadcasts nothing: copies of a shard start from different weights."""

    def wrap(self, module: nn.Module) -> nn.Module:
        load_canonical(self.case.replace(seed=self.case.seed + self.ranks.rank), module)
        return super().wrap(module)


@mutant(
    "megatron-gather-order",
    strategy="zero-1",
    case=OUT_OF_ORDER,
    quantity="loss",
    source="NVIDIA/Megatron-LM#950, #663; NVIDIA-NeMo/RL#552",
    mistake="gathered weights are waited for in the order of registration, not of execution",
)
class GatheredInOrder(LateWeights):
    """A module waits for the oldest outstanding bucket instead of its own, and runs with weights of the last update."""

    def wait_for(self, module: nn.Module) -> None:
        super().wait_for(next(iter(self.arriving), module))


@mutant(
    "ao-h2d-not-waited",
    strategy="zero-1",
    case=SHARDS,
    quantity="loss",
    source="pytorch/ao#1649; NVIDIA/TransformerEngine#1026",
    mistake="the next forward pass starts before the last chunk of weights is copied back",
)
class LastChunkMissing(LateWeights):
    """The copy of the last chunk is not waited for: partly old weights."""

    def publish(self) -> None:
        super().publish()
        self.arriving.popitem()


@mutant(
    "deepspeed-hpz",
    strategy="zero-3",
    case=SHARDS,
    quantity="loss",
    source="deepspeedai/DeepSpeed#5059",
    mistake="a secondary copy of the weights is read before it is filled",
)
class ReadBeforeFilled(SecondCopy):
    """The second gather of a window comes before the copy nearby has been filled, and reads zeros."""

    def keep(self) -> None:
        self.nearby = torch.zeros_like(self.full)


@mutant(
    "megatron-norm-mixed-fresh",
    strategy="zero-1",
    case=SHARDS,
    quantity="weight norm",
    source="NVIDIA/Megatron-LM#7131",
    mistake="the norm of the weights is logged before updated shards are gathered",
)
class NormBeforeGather(Zero1):
    """The logged norm mixes the own updated shard with what the other shards were before the step."""

    def publish(self) -> None:
        mixed = self.flat.flatten([p.detach() for _, p in self.whole], self.shard)
        mixed.view(self.shard_count, -1)[self.shard_index] = self.shard
        self.mixed = mixed
        super().publish()

    def updated_weights(self) -> list[Tensor]:
        return [self.mixed]


# ---------------------------------------------------------------------------------------------- optimizer


@mutant(
    "deepspeed-adam-step",
    strategy="zero-1",
    case=SHARDS_ADAM,
    quantity="weight update",
    source="deepspeedai/DeepSpeed#1823, #7819, #8471",
    mistake="one step counter of Adam is shared by groups that are stepped one by one",
)
class SharedCounter(Zero1):
    """The counter advances once per parameter, so bias correction runs ahead within a single update."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer, counter = super().make_optimizer(), torch.zeros(())
        for _, p in self.trainable():
            optimizer.state[p] = {"step": counter, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return optimizer


@mutant(
    "deepspeed-adam-step-unused",
    strategy="dp",
    case=BRANCH_UNUSED,
    quantity="optimizer state",
    source="deepspeedai/DeepSpeed#1823, #7819, #8471",
    mistake="step counters of parameters that a window did not use advance with those of the others",
)
class CountersTogether(DataParallel):
    """A parameter without a gradient keeps its moments, yet its counter takes the value of the others."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        counters = [state["step"] for state in self.optimizer.state.values()]
        for counter in counters:
            counter.fill_(max(counters))


@mutant(
    "fsdp-flat-weight-decay",
    strategy="fsdp1-full",
    case=VECTORS_WITHOUT_DECAY,
    quantity="weight update",
    source="mlfoundations/open_clip#358; pytorch/pytorch#101343; verl-project/verl#5070, #7215",
    mistake="groups for weight decay are chosen by the dimensions of local views, which are flat",
)
class DecayByLocalShape(FSDP1):
    """After wrapping no parameter has two dimensions, so nothing decays."""

    def decays(self, name: str, tensor: Tensor) -> bool:
        return tensor.ndim >= 2


@mutant(
    "shampoo-skip",
    strategy="zero-1",
    case=EMPTY_SHARD,
    quantity="step",
    source="facebookresearch/optimizers#149",
    mistake="a rank whose shard is empty skips the update, counters included",
)
class EmptyRankSkips(Zero1):
    """A rank without parameters returns early; only its part in the gather is kept."""

    def advance(self, observe: Observe) -> None:
        if self.pieces:
            super().advance(observe)
        else:
            self.publish()


@mutant(
    "megatron-stale-masters",
    strategy="zero-1",
    case=MIDDLE_SGD,
    quantity="weight update",
    source="NVIDIA/Megatron-LM#5071; PrimeIntellect-ai/prime-rl#3234",
    mistake="loading restores the model's weights but not the optimizer's master copies",
    chapter="restore",
)
class StaleMasters(Zero1):
    """The first step after loading starts from the initial master weights and undoes the checkpoint."""

    def load_shard(self, shard: Tensor) -> None:
        stale = self.shard.clone()
        super().load_shard(shard)
        self.shard.copy_(stale)
