"""Which parallel style of torch.distributed.tensor.parallel every layer gets."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from equivtests.models.gpt import GPT, Attention

Plan = dict[str, ParallelStyle]

HEADS, SEQUENCE = 1, 1
"""Dimensions: heads of (rows, heads, positions, size); positions of (rows, positions, width)."""


class Replicated(ParallelStyle):
    """Parameters that every rank keeps whole, as DTensors: clipping and optimizers want all parameters on one mesh.

    enter: how inputs lie that are no DTensors. leave: how the output is to lie; it leaves as a local tensor. partial: each
    rank uses a part of the output only, so that the output's gradients are parts of a sum.
    """

    def __init__(self, enter: Placement = Replicate(), leave: Placement = Replicate(), partial: bool = False) -> None:
        super().__init__()
        self.enter, self.leave, self.partial = enter, leave, partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: Any = self._whole, self._local  # annotated upstream as if they returned nothing
        return distribute_module(module, device_mesh, None, *hooks)

    def _whole(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.enter], run_check=False)
        return (x.redistribute(placements=[Replicate()]), *inputs[1:])

    def _local(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        placed = output.redistribute(placements=[self.leave])
        return placed.to_local(grad_placements=[Partial()] if self.partial else None)


class GptPlan:
    """A decoder's plan. sequence: norms see part of each sequence; loss: logits stay cut for a parallel loss."""

    def __init__(self, module: GPT, ranks: int, sequence: bool, loss: bool) -> None:
        self.module, self.ranks, self.sequence = module, ranks, sequence
        self.stream: Placement = Shard(SEQUENCE) if sequence else Replicate()
        self.logits: Placement = Shard(-1) if loss else Replicate()

    def plan(self) -> Plan:
        found: Plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=self.stream),
            "positions": Replicated(leave=self.stream),
            "norm": self.norm(),
        }
        for head in ("head", "extra_head"):
            if hasattr(self.module, head):
                found[head] = self.head()
        for i in range(self.module.depth):
            found |= self.block(f"layers.{i}")
        return found

    def head(self) -> ParallelStyle:
        gathered = isinstance(self.logits, Replicate)
        return ColwiseParallel(input_layouts=self.stream, output_layouts=self.logits, use_local_output=gathered)

    def norm(self) -> ParallelStyle:
        return SequenceParallel() if self.sequence else Replicated()

    def block(self, name: str) -> Plan:
        found: Plan = {f"{name}.norm1": self.norm(), f"{name}.norm2": self.norm()}
        if self.sequence:
            found[f"{name}.attention"] = PrepareModuleInput(
                input_layouts=(self.stream, None), desired_input_layouts=(Replicate(), None)
            )
            found[f"{name}.mlp"] = PrepareModuleInput(
                input_layouts=(self.stream,), desired_input_layouts=(Replicate(),)
            )
        return found | self.attention(f"{name}.attention") | self.feedforward(f"{name}.mlp")

    def attention(self, name: str) -> Plan:
        """Whole heads per rank. What cannot be cut into heads stays whole; so do keys and values that ranks share."""
        attention = self.module.get_submodule(name)
        assert isinstance(attention, Attention)
        norms = [n for n in ("q_norm", "k_norm") if not isinstance(getattr(attention, n), nn.Identity)]
        if len(attention.kv_of) % self.ranks:
            uncut: Plan = {f"{name}.{part}": Replicated() for part in ("q", "k", "v", *norms)}
            return uncut | {f"{name}.o": Replicated(leave=self.stream)}
        found: Plan = {f"{name}.q": ColwiseParallel(), f"{name}.o": RowwiseParallel(output_layouts=self.stream)}
        shared = kv_heads(attention) % self.ranks
        found |= {f"{name}.{part}": Replicated(partial=True) if shared else ColwiseParallel() for part in "kv"}
        # A norm over each head is one over a sequence whose positions are the heads.
        return found | {f"{name}.{norm}": SequenceParallel(sequence_dim=HEADS, use_local_output=True) for norm in norms}

    def feedforward(self, name: str) -> Plan:
        """Columns, then rows; DTensors go between them where the hidden width cannot be cut into equal parts."""
        columns = [part for part in ("up", "gate") if hasattr(self.module.get_submodule(name), part)]
        even = self.module.get_parameter(f"{name}.up.weight").shape[0] % self.ranks == 0
        found: Plan = {f"{name}.{part}": ColwiseParallel(use_local_output=even) for part in columns}
        return found | {f"{name}.down": RowwiseParallel(output_layouts=self.stream)}


def plain_plan(module: nn.Module) -> Plan:
    """linear, mlp and gated_mlp: columns, then rows. DTensors go between the two, so that sizes need not divide."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    stacked = [name for name in names if name.startswith("layers.")]
    rows = set(stacked[1::2]) | ({"down"} & set(names))
    found: Plan = {name: ColwiseParallel(use_local_output=False) for name in names if name not in rows}
    found |= {name: RowwiseParallel() for name in rows}
    if names[-1] not in rows:
        found[names[-1]] = ColwiseParallel(output_layouts=Replicate())
    return found


def kv_heads(attention: Attention) -> int:
    """Heads of keys and values of the whole layer."""
    return int(attention.k.weight.shape[0]) // attention.size


def use_own_heads(attention: Attention, rank: int, ranks: int) -> None:
    """Tell the layer which of the keys and values that are here the query heads of this rank use."""
    heads, kv = len(attention.kv_of), kv_heads(attention)
    if heads % ranks:
        return
    own = attention.kv_of[rank * heads // ranks : (rank + 1) * heads // ranks]
    first = 0 if kv % ranks else rank * kv // ranks
    attention.kv_of = [head - first for head in own]
