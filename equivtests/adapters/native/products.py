"""Products of torch's own strategies: FSDP2 with tensor parallelism; pipelines with DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from equivtests.adapters.adapter import Claims, KnownDivergence
from equivtests.adapters.native.fsdp1 import ALL, units
from equivtests.adapters.native.pipeline import Pipeline, pipeline_strategy
from equivtests.adapters.native.stages import Stage
from equivtests.adapters.native.tensor import TensorParallel, tensor_strategy
from equivtests.adapters.torch_adapter import TorchAdapter
from equivtests.cases.windows import MicroBatch, Window

GPT = frozenset({"gpt"})

NOT_REDUCED = KnownDivergence(
    case="*-dp2-pp2v2*",
    quantity="gradient",
    reason="a split backward pass never calls the hooks that DDP reduces gradients in: every data rank keeps its own",
    link="https://github.com/pytorch/pytorch/issues/144530",
)
RESHARDED = KnownDivergence(
    case="*",
    quantity="gradient",
    reason="a split backward pass looks for the parameters of layers that were resharded after the forward pass, and "
    "forms no gradients of those that it does not find",
    link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/pipelining/stage.py",
)


def claims(*strategies: Any) -> Claims:
    return Claims(strategies, framework=f"torch {torch.__version__}")


class ShardedTensorParallel(TensorParallel):
    """Tensor parallelism inside of fully_shard: layers are cut over tensor ranks first, and the parts over data ranks."""

    def claims(self) -> Claims:
        sharded: dict[str, Any] = {"families": GPT, "shards": ALL, "replicates": True, "data_ranks": 2}
        return claims(tensor_strategy("fsdp2-tp-sequence", **sharded))

    def wrap(self, module: nn.Module) -> nn.Module:
        data = ("replicate", "shard") if self.layout.replicate > 1 else ("dp",)
        mesh = self.ranks.split_mesh(self.layout, *data, "tp")
        self.parallelize(module, mesh["tp"])
        self.watch_last(module)
        over = mesh[data] if len(data) > 1 else mesh["dp"]
        for layer in units(module):
            fully_shard(layer, mesh=over)
        fully_shard(module, mesh=over)
        return module

    def balanced(self, window: Window) -> list[MicroBatch]:
        """Data ranks gather and reduce together in every micro-batch."""
        return TorchAdapter.balanced(self, window)

    def synchronize(self) -> None:
        """fully_shard has done it."""


class PipelineDDP(Pipeline):
    """Every stage in DistributedDataParallel, which torch's stages switch on for the last backward pass."""

    def claims(self) -> Claims:
        names = ("1f1b", "interleaved-1f1b")
        return claims(
            *(pipeline_strategy(f"ddp-{name}", name, algorithm="pipeline-filled", data_ranks=2) for name in names),
            pipeline_strategy("ddp-zero-bubble", "zero-bubble", known=(NOT_REDUCED,), data_ranks=2),
        )

    def wrap_stage(self, stage: Stage) -> nn.Module:
        return DistributedDataParallel(stage, process_group=self.data_group())

    def average_stages(self) -> None:
        """DDP has done it."""


class PipelineFSDP2(Pipeline):
    """Every layer of a stage, and the stage, in fully_shard."""

    def claims(self) -> Claims:
        sharded: dict[str, Any] = {"families": frozenset({"mlp", "gpt"}), "shards": ALL, "restores": False}
        sharded |= {"data_ranks": 2}
        names = ("1f1b", "zero-bubble")
        return claims(
            *(pipeline_strategy(f"fsdp2-{name}", name, **sharded) for name in names),
            pipeline_strategy("fsdp2-zero-bubble-reshard", "zero-bubble", **sharded | {"known": (RESHARDED,)}),
        )

    def wrap_stage(self, stage: Stage) -> nn.Module:
        mesh = self.ranks.split_mesh(self.layout, "dp", "pp")["dp"]
        again = self.strategy.endswith("reshard")  # gathering layers once per window is what a pipeline is to do
        for layer in stage.layers_here:
            fully_shard(layer, mesh=mesh, reshard_after_forward=again)
        fully_shard(stage, mesh=mesh, reshard_after_forward=again)
        return stage

    def average_stages(self) -> None:
        """fully_shard has done it."""


class TensorPipeline(Pipeline, TensorParallel):
    """Stages of layers that are cut over tensor ranks."""

    def claims(self) -> Claims:
        tensor: dict[str, Any] = {"axes": frozenset({"dp", "tp", "pp"}), "families": GPT, "restores": False}
        names = ("gpipe-tp", "gpipe"), ("1f1b-tp-sequence", "1f1b")
        return claims(*(pipeline_strategy(f"torch-{name}", schedule, **tensor) for name, schedule in names))

    def cut_layers(self, module: nn.Module) -> None:
        self.parallelize(module, self.ranks.split_mesh(self.layout, "dp", "tp", "pp")["tp"])

    def between(self, inputs: Tensor) -> tuple[int, int, int]:
        rows, length, width = super().between(inputs)
        return rows, length // self.layout.tp if self.sequence else length, width

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        with self.loss_context():
            return super().accumulate(batches)
