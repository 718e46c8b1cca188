"""A bare training script in the form of an adapter: builds, steps and gathers whole tensors, shows and judges nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from equivtests.adapters.adapter import Adapter, Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.cases.case import Case
from equivtests.cases.windows import Feed, MicroBatch, empty_micro_batch
from equivtests.models.build import build
from equivtests.record.observation import Observe


class Empty(Adapter):
    """Does nothing: what is left is the cost of asking."""

    def claims(self) -> Claims:
        return Claims((Strategy("ddp"), Strategy("fsdp2")))

    def setup(self, case: Case, ranks: Ranks) -> None:
        pass

    def run(self, feed: Feed, observe: Observe) -> None:
        for _ in range(feed.stop):
            feed.position += 1


class Bare(Empty):
    """DDP or FSDP2 by hand: the loop that anybody would write to compare updates."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        self.case, self.ranks = case, ranks
        self.module, _ = build(case)
        if self.strategy == "ddp":
            self.model: Any = DistributedDataParallel(self.module)
        else:
            mesh = ranks.mesh((ranks.world,), ("shard",))
            for layer in getattr(self.module, "layers", []):
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(self.module, mesh=mesh)
        o = case.optimizer
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = (
            torch.optim.SGD(parameters, lr=o.lr) if o.name == "sgd" else torch.optim.AdamW(parameters, lr=o.lr)
        )

    def run(self, feed: Feed, observe: Observe) -> None:
        for window in feed:
            counts = torch.tensor([len(window.microbatches), sum(b.tokens for b in window.microbatches)])
            gathered = [torch.zeros_like(counts) for _ in range(self.ranks.world)]
            dist.all_gather(gathered, counts)
            most, tokens = max(int(c[0]) for c in gathered), sum(int(c[1]) for c in gathered)
            if tokens:
                batches = list(window.microbatches) + [empty_micro_batch(self.case)] * (most - len(window.microbatches))
                self.step(batches, tokens)

    def step(self, batches: list[MicroBatch], tokens: int) -> None:
        for b in batches:
            arrays = [torch.from_numpy(a) for a in (b.inputs, b.targets, b.valid, b.ids)]
            arrays = [a.to(torch.float32) if a.is_floating_point() else a for a in arrays]
            terms = self.model(*arrays, b.conditional)
            (terms["main"] * self.ranks.world / tokens).backward()
        self.gather(p.grad for p in self.module.parameters())
        self.optimizer.step()
        self.gather(self.module.parameters())
        self.gather(v for state in self.optimizer.state.values() for v in state.values())
        self.optimizer.zero_grad()

    def gather(self, tensors: Any) -> list[np.ndarray]:
        """Tensor by tensor: the whole of what is sharded, and every rank's copy of what is not (on rank 0)."""
        gathered = []
        for tensor in (t.detach() for t in tensors if isinstance(t, torch.Tensor)):
            if hasattr(tensor, "full_tensor"):
                gathered.append(tensor.full_tensor())
            else:
                copies = [torch.empty_like(tensor) for _ in range(self.ranks.world)] if self.ranks.rank == 0 else None
                dist.gather(tensor, copies)
                gathered += copies or []
        return [t.numpy().copy() for t in gathered]
