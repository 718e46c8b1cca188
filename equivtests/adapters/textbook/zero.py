"""ZeRO stages 1, 2 and 3 from collectives (Rajbhandari et al., ZeRO, SC 2020, section 5).

All trained parameters lie in one flat vector, cut over the ranks of a shard group. Every stage updates only the own
shard; stage 2 keeps only the own shard of gradients, stage 3 only the own shard of weights. With `layout.replicate` > 1
the shards have copies in other groups, and the reduced gradients are added up over the copies as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.textbook.collectives import all_gather, all_reduce, any_rank, reduce_scatter
from equivtests.adapters.textbook.dp import SPANS, TEXTBOOK_FEATURES, TEXTBOOK_OBSERVES
from equivtests.adapters.textbook.flat import FlatLayout, Piece
from equivtests.adapters.torch_adapter import Shown, TorchAdapter
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Observe, Place


def zero_claims(stage: int, shards: set[str], algorithm: str, observes: frozenset[str] = TEXTBOOK_OBSERVES) -> Claims:
    strategy = Strategy(
        f"zero-{stage}",
        features=TEXTBOOK_FEATURES,
        denominators=SPANS,
        loss_scale=True,
        replicates=True,
        restores=True,
        shards=frozenset(shards),
        observes=observes,
        algorithm=algorithm,
        cut="flat",
    )
    return Claims((strategy,), framework="equivtests textbook")


class Zero1(TorchAdapter):
    """Stage 1: gradients are reduced to their owner once per update, weights are gathered after the step."""

    def claims(self) -> Claims:
        return zero_claims(1, {"state"}, "zero1-reduce-scatter", TEXTBOOK_OBSERVES | {"weight_norm"})

    # ------------------------------------------------------------------ the shard

    def wrap(self, module: nn.Module) -> nn.Module:
        self.make_groups()
        self.whole = self.sharded_parameters(module)
        self.flat = FlatLayout(list(self.whole), self.shard_count)
        full = self.flat.flatten([p.detach() for _, p in self.whole], self.whole[0][1].detach())
        self.shard = full.view(self.shard_count, -1)[self.shard_index].clone()
        self.pieces = [(p, nn.Parameter(self.cut(self.shard, p))) for p in self.flat.pieces(self.shard_index)]
        return module

    def sharded_parameters(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in module.named_parameters() if p.requires_grad]

    def make_groups(self) -> None:
        layout = self.case.layout
        mesh = self.ranks.mesh((layout.replicate, layout.shard), ("replicate", "shard"))
        self.shard_group, self.replicate_group = mesh.get_group("shard"), mesh.get_group("replicate")
        self.shard_count, self.shard_index = layout.shard, self.ranks.rank % layout.shard
        self.replica = self.ranks.rank // layout.shard

    @staticmethod
    def cut(shard: Tensor, piece: Piece) -> Tensor:
        return shard[piece.offset : piece.offset + piece.stop - piece.start]

    def trainable(self) -> list[tuple[str, Tensor]]:
        return [(piece.name, parameter) for piece, parameter in self.pieces]

    # ------------------------------------------------------------------ gradients

    def synchronize(self) -> None:
        self.mark_used()
        self.set_shard_gradient(self.reduce(self.local_gradient()))

    def mark_used(self) -> None:
        """Names of parameters that some rank has a gradient for."""
        flags = any_rank([p.grad is not None for _, p in self.whole], self.ranks.device)
        self.used = {name for (name, _), yes in zip(self.whole, flags, strict=True) if yes}

    def local_gradient(self) -> Tensor:
        """This rank's gradients as one vector; the parameters' own are freed."""
        flat = self.flat.flatten([p.grad for _, p in self.whole], self.shard)
        for _, parameter in self.whole:
            parameter.grad = None
        return flat

    def reduce(self, flat: Tensor) -> Tensor:
        """The own shard of the average over all ranks."""
        return self.average(self.add_ranks(flat))

    def add_ranks(self, flat: Tensor) -> Tensor:
        """The own shard of the sum: added up in the shard group, then over its copies."""
        return self.reduce_replicas(reduce_scatter(flat, self.shard_group))

    def reduce_replicas(self, shard: Tensor) -> Tensor:
        return all_reduce(shard, self.replicate_group) if self.case.layout.replicate > 1 else shard

    def average(self, shard: Tensor) -> Tensor:
        return shard.div_(self.ranks.world)

    def set_shard_gradient(self, shard: Tensor) -> None:
        for piece, parameter in self.pieces:
            parameter.grad = self.cut(shard, piece) if piece.name in self.used else None

    def gradient_norm(self, order: float) -> Tensor:
        """Norms of the shards combined over the shard group: each element is counted once."""
        gradients = [g.flatten() for _, g, _ in self.gradients()]
        own = torch.linalg.vector_norm(torch.cat([*gradients, self.shard.new_zeros(1)]), order)
        if order == math.inf:
            return all_reduce(own, self.shard_group, dist.ReduceOp.MAX)
        return self.add_squares(own * own).sqrt()

    def add_squares(self, own: Tensor) -> Tensor:
        return all_reduce(own, self.shard_group)

    # ------------------------------------------------------------------ step

    def advance(self, observe: Observe) -> None:
        super().advance(observe)
        self.show_weight_norm(observe)

    def show_weight_norm(self, observe: Observe) -> None:
        norm = torch.linalg.vector_norm(torch.cat([w.detach().double().flatten() for w in self.updated_weights()]))
        here = Place((), replica=self.ranks.rank)
        observe("weight_norm", "weight_norm", norm.cpu().numpy(), update=self.window.update, place=here)

    def updated_weights(self) -> list[Tensor]:
        """All weights after the step, whole, as this rank logs their norm."""
        return list(self.module.parameters())

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.publish()

    def publish(self) -> None:
        """Gather the updated shards into everybody's whole weights."""
        with torch.no_grad():
            gathered = self.flat.unflatten(all_gather(self.shard, self.shard_group))
            for (_, parameter), value in zip(self.whole, gathered, strict=True):
                parameter.copy_(value)

    # ------------------------------------------------------------------ showing

    def shown(self) -> Iterator[Shown]:
        """Whole weights, held by every rank."""
        yield from super().shown()

    def shown_pieces(self) -> Iterator[Shown]:
        for piece, parameter in self.pieces:
            yield piece.name, parameter, piece.place(self.replica)

    def gradients(self) -> Iterator[Shown]:
        for name, parameter, place in self.shown_pieces():
            if parameter.grad is not None:
                yield name, parameter.grad, place

    def optimizer_state(self) -> Iterator[Shown]:
        for name, parameter, place in self.shown_pieces():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}/{key}", value, Place((), replica=self.ranks.rank) if value.ndim == 0 else place

    # ------------------------------------------------------------------ checkpoints: every rank writes its own shard

    def save_tensors(self, directory: Path) -> None:
        state = {n: t.detach().clone() for n, t, _ in self.optimizer_state()}
        save_file({"shard": self.shard, **state}, self.shard_file(directory))

    def shard_file(self, directory: Path) -> Path:
        return directory / f"rank-{self.ranks.rank}.safetensors"

    def load_tensors(self, directory: Path) -> None:
        saved = load_file(self.shard_file(directory))
        self.load_shard(saved.pop("shard"))
        self.load_optimizer(saved)

    def load_shard(self, shard: Tensor) -> None:
        self.shard.copy_(shard)
        self.publish()

    def load_optimizer(self, saved: dict[str, Tensor]) -> None:
        for name, parameter in self.trainable():
            keys = {n.removeprefix(f"{name}/"): t for n, t in saved.items() if n.rpartition("/")[0] == name}
            if keys:
                self.optimizer.state[parameter] = keys


class Zero2(Zero1):
    """Stage 2: gradients are reduced to their owner after every micro-batch; only the own shard is kept."""

    def claims(self) -> Claims:
        return zero_claims(2, {"state", "gradients"}, "zero2", TEXTBOOK_OBSERVES | {"weight_norm"})

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        self.gradient_shard = torch.zeros_like(self.shard)
        self.used: set[str] = set()
        return super().accumulate(batches)

    def accumulated(self) -> list[Tensor]:
        return [*super().accumulated(), self.gradient_shard]

    def after_backward(self, k: int) -> None:
        self.used |= {name for name, p in self.whole if p.grad is not None}
        self.collect(self.local_gradient())

    def collect(self, flat: Tensor) -> None:
        """Add one micro-batch's gradient to the own shard of the window's."""
        self.gradient_shard += self.reduce(flat)

    def synchronize(self) -> None:
        flags = any_rank([name in self.used for name, _ in self.whole], self.ranks.device)
        self.used = {name for (name, _), yes in zip(self.whole, flags, strict=True) if yes}
        self.set_shard_gradient(self.gradient_shard)


class Zero3(Zero2):
    """Stage 3: weights are gathered for the forward pass, freed, and gathered again for the backward pass."""

    def claims(self) -> Claims:
        return zero_claims(3, {"state", "gradients", "weights"}, "zero3")

    def wrap(self, module: nn.Module) -> nn.Module:
        wrapped = super().wrap(module)
        self.full = self.shard.new_zeros(self.flat.padded)
        for (_, parameter), view in zip(self.whole, self.flat.unflatten(self.full), strict=True):
            parameter.data = view
        self.free()
        return wrapped

    def gather(self) -> None:
        """Fill the whole weights from all shards."""
        self.full.untyped_storage().resize_(self.flat.padded * self.full.element_size())
        self.full.data.copy_(all_gather(self.shard, self.shard_group))  # .data: what autograd saved stays valid

    def free(self) -> None:
        """Give the memory of the whole weights back."""
        self.full.untyped_storage().resize_(0)

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.gather()
        objective = self.objective(self.forward(self.model, batch), k, batch)
        self.free()
        self.gather()
        self.backward(objective)
        self.free()
        return objective

    def publish(self) -> None:
        """Nothing: the whole weights exist only while they are used."""

    def show_weight_norm(self, observe: Observe) -> None:
        """Nothing: no rank holds all weights after the step."""

    def shown(self) -> Iterator[Shown]:
        """The own pieces of trained weights, and what is not trained (held whole by every rank)."""
        yield from self.shown_pieces()
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                yield name, parameter, Place(tuple(parameter.shape), replica=self.ranks.rank)
