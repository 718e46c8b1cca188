"""Mistakes that leave every number right: what travels, or what is kept, is not what was asked for."""

# No postponed annotations here: torch compares those of communication hooks with its own types.

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from equivtests.adapters.native.ddp import DDP
from equivtests.adapters.native.fsdp2 import FSDP2
from equivtests.adapters.textbook.zero import Zero1
from equivtests.adapters.torch_adapter import Shown
from equivtests.cases.grid import ADAM, FP16_WIRE, GPT, ODD_MLP, SGD, UNEQUAL, case
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import TWO_BY_THREE_MLP
from equivtests.record.observation import Place

NARROW_WIRE = case("narrow-wire", ODD_MLP, UNEQUAL, SGD, FP16_WIRE)(2, 0)
FOUR_MICRO_BATCHES = case("four-micro-batches", ODD_MLP, UNEQUAL)(2, 0)
TWO_MOMENTS = case("two-moments", GPT, UNEQUAL, ADAM)(2, 0)


def narrow_copy_into_wide(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A compression hook whose narrow copy is written back into a float32 tensor before it is sent."""
    bucket.buffer().copy_(bucket.buffer().half())
    return allreduce_hook(group, bucket)


@mutant(
    "fp16-hook-noop",
    strategy="ddp-fp16-hook",
    case=NARROW_WIRE,
    quantity="collectives",
    source="pytorch/pytorch#63375",
    mistake="the compression hook sends float32: gradients are rounded to float16, and nothing is saved",
    chapter="ledger",
)
class Fp16HookNoop(DDP):
    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        model = DistributedDataParallel(module)
        model.register_comm_hook(dist.group.WORLD, narrow_copy_into_wide)
        return model


@mutant(
    "fsdp-wraps-nothing",
    strategy="fsdp2",
    case=TWO_MOMENTS,
    quantity="collectives",
    source="huggingface/accelerate 1.15.0: an FSDP plugin on CPU ranks gives DistributedDataParallel without a message",
    mistake="the sharded wrapper is plain DDP: correct gradients, nothing is sharded",
    chapter="ledger",
)
@mutant(
    "fsdp-shards-nothing",
    strategy="fsdp2",
    case=TWO_BY_THREE_MLP,
    quantity="vacuity",
    source="huggingface/accelerate 1.15.0: an FSDP plugin on CPU ranks gives DistributedDataParallel without a message",
    mistake="the sharded wrapper is plain DDP, in a framework whose collectives are not looked at",
)
class FsdpWrapsNothing(FSDP2):
    def wrap(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module)

    def shown(self) -> Iterator[Shown]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter, Place(tuple(parameter.shape), replica=self.ranks.rank)


@mutant(
    "zero1-keeps-all-state",
    strategy="zero-1",
    case=TWO_MOMENTS,
    quantity="bytes",
    source="AI-Hypercomputer/maxtext#5104",
    mistake="every rank keeps moments of the whole model, and uses its own part of them",
    chapter="ledger",
)
class Zero1KeepsAllState(Zero1):
    def optimizer_step(self) -> None:
        super().optimizer_step()
        whole: dict[str, Tensor] = {}
        for piece, parameter in self.pieces:
            state = self.optimizer.state[parameter]
            for key in [key for key, value in state.items() if value.ndim]:
                moments = whole.setdefault(key, self.shard.new_zeros(self.flat.padded))
                own = self.cut(moments.view(self.shard_count, -1)[self.shard_index], piece)
                state[key] = own.copy_(state[key])


@mutant(
    "no-sync-ignored",
    strategy="ddp-no-sync",
    case=FOUR_MICRO_BATCHES,
    quantity="collectives",
    source="NVIDIA/cosmos-framework#161, Lightning-AI/pytorch-lightning#4092",
    mistake="gradients are reduced in every micro-batch, not once per update: same gradients, k times the traffic",
    chapter="ledger",
)
class NoSyncIgnored(DDP):
    def synchronization(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()
