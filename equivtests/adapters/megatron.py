"""Megatron Core: the layers, the embedding and the cross-entropy of its tensor parallelism, on CPUs.

Written like https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/tensor_parallel.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims, KnownDivergence
from equivtests.adapters.context import Ranks
from equivtests.adapters.megatron_models import Column, CutVocabulary, Row, copied
from equivtests.adapters.native.plan import use_own_heads
from equivtests.adapters.native.tensor import tensor_strategy
from equivtests.adapters.torch_adapter import SHOWN, Shown, TorchAdapter
from equivtests.cases.case import Case
from equivtests.models.gpt import GPT, Attention
from equivtests.record.observation import Place

ROWS = ("o", "down", "linear")
LOCAL_SMOOTHING = KnownDivergence(
    case="gpt-auxiliary-*",
    quantity="loss",
    reason="smoothed targets take each rank's part of the vocabulary for all of it",
    link="https://github.com/NVIDIA/Megatron-LM/issues/7464",
)


class Megatron(TorchAdapter):
    """Megatron cuts canonical weights, and notes how. Data ranks are averaged by hand, over its groups."""

    def claims(self) -> Claims:
        options: dict[str, Any] = {"precisions": frozenset({"float32"}), "uneven": False, "known": (LOCAL_SMOOTHING,)}
        options |= {"observes": SHOWN}
        return Claims(
            (tensor_strategy("megatron-tp", **options),),
            framework=f"megatron-core {megatron.core.__version__}",
            isolation="case",  # its groups are made once per process
            preload=("megatron.core.tensor_parallel",),
            mutants=("equivtests.mutants.outside.megatron",),
        )

    def setup(self, case: Case, ranks: Ranks) -> None:
        layout = case.layout
        parallel_state.initialize_model_parallel(layout.tp, order="-".join(reversed(layout.order)))
        self.tp, self.index = layout.tp, parallel_state.get_tensor_model_parallel_rank()
        self.config = ModelParallelConfig(tensor_model_parallel_size=layout.tp, use_cpu_initialization=True)
        super().setup(case, ranks)

    def wrap(self, module: nn.Module) -> nn.Module:
        for part in module.modules():
            if isinstance(part, Attention):
                use_own_heads(part, self.index, self.tp)
        for name, layer in list(module.named_modules()):
            if isinstance(layer, nn.Linear):
                module.set_submodule(name, self.row(name, layer) if self.is_row(name) else self.column(name, layer))
        if isinstance(module, GPT):
            self.cut_vocabulary(module)
        return module

    def is_row(self, name: str) -> bool:
        """mlp: columns and rows by turns, so that rows are the last; outputs of columns could not be gathered."""
        last = name.split(".")[-1]
        return (self.case.model.depth - int(last)) % 2 == 1 if last.isdigit() else last in ROWS

    def column(self, name: str, layer: nn.Linear) -> nn.Module:
        tied = name == "head" and self.case.model.has("tied")
        made = Column(
            layer.in_features, layer.out_features, bias=layer.bias is not None, config=self.config,
            init_method=copied(layer.weight), skip_weight_param_allocation=tied,
        )  # fmt: skip
        if made.bias is not None:
            made.bias.data.copy_(layer.bias.detach().chunk(self.tp)[self.index])
        return made

    def row(self, name: str, layer: nn.Linear) -> nn.Module:
        made = Row(
            layer.in_features, layer.out_features, bias=layer.bias is not None, skip_bias_add=False, config=self.config,
            init_method=copied(layer.weight), input_is_parallel=name not in ("linear", "layers.0"),
        )  # fmt: skip
        if made.bias is not None:
            made.bias.data.copy_(layer.bias.detach())
        return made

    def cut_vocabulary(self, module: GPT) -> None:
        sizes, weight = (module.embedding.num_embeddings, module.embedding.embedding_dim), module.embedding.weight
        cut = tensor_parallel.VocabParallelEmbedding(*sizes, init_method=copied(weight), config=self.config)
        module.set_submodule("embedding", cut)
        if self.case.model.has("tied"):
            head: Any = module.head
            head.borrowed = lambda: cut.weight
        module.vocabulary = CutVocabulary(module.vocabulary.smoothing)

    def shown(self) -> Iterator[Shown]:
        parameter: Any
        for name, parameter in self.module.named_parameters():
            cut = ["tp"] if getattr(parameter, "tensor_model_parallel", False) else []
            shape, box = list(parameter.shape), [(0, n) for n in parameter.shape]
            if cut:
                dim, n = parameter.partition_dim, parameter.shape[parameter.partition_dim]
                shape[dim], box[dim] = n * self.tp, (self.index * n, (self.index + 1) * n)
            copy = self.case.layout.copy(self.ranks.rank, *cut)
            yield name, parameter, Place(tuple(shape), tuple(box), replica=copy)

    # ------------------------------------------------------------------ over ranks

    def data_group(self) -> Any:
        return parallel_state.get_data_parallel_group()

    def averaged(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def loss_place(self) -> Place:
        return Place((), replica=self.case.layout.copy(self.ranks.rank, "dp"), partial="mean", parts=self.averaged())

    def synchronize(self) -> None:
        """As finalize_model_grads does: norms of heads are added up, data ranks averaged."""
        for name, gradient, _ in self.gradients():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
            dist.all_reduce(gradient, group=self.data_group())
            gradient /= self.averaged()

    def gradient_norm(self, order: float) -> Tensor:
        """Of what every tensor rank holds, the first one's counts."""
        first = tensor_parallel.param_is_not_tensor_parallel_duplicate
        own = [p.grad for _, p in self.trainable() if p.grad is not None and first(p)]
        norm = torch.nn.utils.get_total_norm(own, order)
        power, operation = (norm, dist.ReduceOp.MAX) if order == math.inf else (norm**order, dist.ReduceOp.SUM)
        dist.all_reduce(power, operation, group=parallel_state.get_model_parallel_group())
        return power if order == math.inf else power ** (1 / order)
