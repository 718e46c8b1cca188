"""DistributedDataParallel and ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from equivtests.adapters.adapter import PLAIN_FEATURES, Claims, Strategy
from equivtests.adapters.torch_adapter import SHOWN, Shown, TorchAdapter
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Place

NATIVE_FEATURES = PLAIN_FEATURES | {"dropout", "extra_head", "z_loss"}
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-no-sync": {},
    "ddp-static-graph": {"static_graph": True},
    "ddp-find-unused": {"find_unused_parameters": True},
    "ddp-tiny-buckets": {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
    "ddp-fp16-hook": {},
}
"""Constructor options of DistributedDataParallel, by strategy."""


def native(name: str, **changes: Any) -> Strategy:
    """A strategy of torch's own, with what all of them share."""
    shared: dict[str, Any] = {"features": NATIVE_FEATURES, "observes": SHOWN, "restores": True}
    return Strategy(name, **(shared | changes))


class DDP(TorchAdapter):
    """DistributedDataParallel in the ways its documentation offers."""

    model: DistributedDataParallel

    def claims(self) -> Claims:
        unused = NATIVE_FEATURES | {"conditional", "unused"}
        return Claims(
            (
                native("ddp", algorithm="all-reduce-per-microbatch"),
                native("ddp-no-sync", algorithm="all-reduce"),
                native("ddp-static-graph", algorithm="all-reduce-per-microbatch"),
                native("ddp-find-unused", features=unused, algorithm="all-reduce-per-microbatch"),
                native("ddp-tiny-buckets", algorithm="all-reduce-per-microbatch"),
                native("ddp-fp16-hook", precisions=frozenset({"float32/float32/float16"}),
                       algorithm="all-reduce-per-microbatch"),
            ),
            framework=f"torch {torch.__version__}",
        )  # fmt: skip

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        model = DistributedDataParallel(module, **OPTIONS[self.strategy])
        if self.strategy == "ddp-fp16-hook":
            model.register_comm_hook(None, fp16_compress_hook)
        return model

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        with self.synchronization(last):
            return super().forward_backward(k, batch, last)

    def synchronization(self, last: bool) -> AbstractContextManager[None]:
        """Where gradients are only accumulated, the last micro-batch alone is reduced."""
        accumulate = self.strategy == "ddp-no-sync" and not last
        return self.model.no_sync() if accumulate else nullcontext()

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, order)

    def save_tensors(self, directory: Path) -> None:
        if self.ranks.rank == 0:
            torch.save(self.module.state_dict(), directory / "model.pt")
            torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")

    def load_tensors(self, directory: Path) -> None:
        self.module.load_state_dict(torch.load(directory / "model.pt", weights_only=True))
        self.optimizer.load_state_dict(torch.load(directory / "optimizer.pt", weights_only=True))


class ZeroRedundancy(DDP):
    """DDP gradients with torch's ZeroRedundancyOptimizer: every parameter's state lives on one rank."""

    optimizer: ZeroRedundancyOptimizer

    def claims(self) -> Claims:
        strategy = native("zero-redundancy", shards=frozenset({"state"}), algorithm="zero1-all-reduce")
        return Claims((strategy,), framework=f"torch {torch.__version__}")

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(module)

    def synchronization(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            self.parameter_groups(), optimizer_class=self.optimizer_class(), **self.optimizer_options()
        )

    def optimizer_state(self) -> Iterator[Shown]:
        """State of the parameters that this rank owns, whole."""
        owned = self.optimizer.optim.state
        for name, parameter, _ in self.shown():
            for key, value in owned.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}/{key}", value, Place(tuple(value.shape))

    def save_tensors(self, directory: Path) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        super().save_tensors(directory)
        dist.barrier()
