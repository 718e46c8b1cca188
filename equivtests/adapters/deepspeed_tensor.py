"""DeepSpeed: tensor-parallel training by AutoTP, which cuts the layers that a partition configuration names.

Written like its documentation: https://www.deepspeed.ai/docs/config-json/ and https://www.deepspeed.ai/tutorials/autotp-training/
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims
from equivtests.adapters.deepspeed import SIZES, DeepSpeed
from equivtests.adapters.deepspeed_claims import tensor_strategies
from equivtests.adapters.native.mesh import SplitModel
from equivtests.adapters.torch_adapter import Shown, TorchAdapter
from equivtests.models.gpt import GPT, Attention
from equivtests.record.observation import Place

Spec = dict[str, Any]
"""One of the layer_specs of a partition configuration."""

GPT_SPECS: tuple[Spec, ...] = (
    {"patterns": [r".*\.attention\.[qkv]\.weight$", r".*\.(gate|up)\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(o|down)\.weight$"], "partition_type": "row"},
    {"patterns": [r"(extra_)?head\.weight$"], "partition_type": "column", "gather_output": True},
    # Norms of heads stay whole, but every rank has heads of its own.
    {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
)


class DeepSpeedTensor(DeepSpeed, SplitModel):
    """The engine cuts layers when it is made, reduces over its data ranks, clips and steps."""

    def claims(self) -> Claims:
        return Claims(
            tensor_strategies(),
            framework=f"deepspeed {deepspeed.__version__}",
            isolation="case",  # its groups are made once per process
            preload=("deepspeed.runtime.zero.muon.muon_optimizer",),
            mutants=("equivtests.mutants.outside.deepspeed_tensor",),
        )

    def config(self) -> dict[str, Any]:
        partition = {"use_default_specs": False, "layer_specs": self.layer_specs()}
        tensor = {"autotp_size": self.layout.tp, "tp_overlap_comm": self.strategy.endswith("overlap")}
        return super().config() | {"tensor_parallel": tensor | {"partition_config": partition}}

    def zero_options(self) -> dict[str, Any]:
        return SIZES | {"stage": int(self.strategy.partition("zero")[2] or 0)}

    def layer_specs(self) -> list[Spec]:
        """A plain model's layers are columns and rows by turns; the last one's outputs are gathered."""
        if isinstance(self.module, GPT):
            return list(GPT_SPECS)
        names = [name for name, layer in self.module.named_modules() if isinstance(layer, nn.Linear)]
        rows = {"down", *[name for name in names if name.startswith("layers.")][1::2]}
        return [spec_of(name, row=name in rows, last=name == names[-1]) for name in names]

    def make_optimizer(self) -> torch.optim.Optimizer:
        if isinstance(self.module, GPT):
            model: Any = self.module  # heads are cut as this says, which models of transformers have
            model.config = SimpleNamespace(num_key_value_heads=self.case.model.kv)
        optimizer = super().make_optimizer()
        for part in self.module.modules():
            if isinstance(part, Attention):
                use_heads_here(part, self.layout.at(self.ranks.rank)["tp"])
        self.watch_output(self.module.get_submodule(self.last_layer()))
        return optimizer

    def last_layer(self) -> str:
        last = {"linear": "linear", "gated_mlp": "down", "gpt": "head"}.get(self.case.model.family)
        return last or f"layers.{self.case.model.depth - 1}"

    # ------------------------------------------------------------------ showing

    def shown(self) -> Iterator[Shown]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter, self.place(parameter)

    def gradients(self) -> Iterator[Shown]:
        """They can be read between the last backward pass and the step."""
        for name, parameter, place in self.shown():
            if parameter.requires_grad:
                yield name, safe_get_full_grad(parameter), place

    def optimizer_state(self) -> Iterator[Shown]:
        """Moments lie as their parameters do; they do not note it themselves."""
        return TorchAdapter.optimizer_state(self)

    def place(self, tensor: Tensor) -> Place:
        """A parameter notes how it is cut, for checkpoints that can be loaded at another size."""
        notes = getattr(tensor, DS_AUTOTP_UC_META, None)
        if not notes or notes["replicated"]:
            return super().place(tensor)
        shape, dim, index = notes["logical_shape"], notes["partition_dim"], self.layout.at(self.ranks.rank)["tp"]
        box = [(0, n) for n in shape]
        box[dim] = shares(notes["partition_sizes"])[index]
        return Place(tuple(shape), tuple(box), replica=self.layout.copy(self.ranks.rank, "tp"))


def spec_of(name: str, row: bool, last: bool) -> Spec:
    kind = {"partition_type": "row"} if row else {"partition_type": "column", "gather_output": last}
    return {"patterns": [f"{name}\\.weight$".replace("layers.", "layers\\.")]} | kind


def shares(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Start and stop of consecutive parts of these sizes."""
    return list(pairwise(accumulate(sizes, initial=0)))


def use_heads_here(attention: Attention, index: int) -> None:
    """Tell the layer which of the keys and values that are here its query heads use."""
    (first, stop), (first_kv, _) = (heads_of(layer, attention.size)[index] for layer in (attention.q, attention.k))
    attention.kv_of = [kv - first_kv for kv in attention.kv_of[first:stop]]


def heads_of(layer: nn.Module, size: int) -> list[tuple[int, int]]:
    """The heads of `size` features that a cut layer gives on every tensor rank."""
    notes: dict[str, Any] = getattr(layer.weight, DS_AUTOTP_UC_META)
    return shares(tuple(n // size for n in notes["partition_sizes"]))
