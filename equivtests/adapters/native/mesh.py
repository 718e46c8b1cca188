"""What torch's own strategies for split models share: who is fed the same data, and where DTensors lie on the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from equivtests.adapters.native.checkpoint import DistributedCheckpoint
from equivtests.adapters.places import dtensor_place, show
from equivtests.adapters.torch_adapter import Shown
from equivtests.cases.layout import Layout
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Observe, Place


class SplitModel(DistributedCheckpoint):
    """A model that is cut over ranks; data ranks are fed different parts of the window, and averaged.

    The names of a DTensor's mesh axes are axes of the layout.
    """

    @property
    def layout(self) -> Layout:
        return self.case.layout

    def data_group(self) -> Any:
        return self.ranks.group(self.layout.partition("dp"))

    def averaged(self) -> int:
        return self.layout.dp

    def loss_place(self) -> Place:
        return Place((), replica=self.layout.copy(self.ranks.rank, "dp"), partial="mean", parts=self.layout.dp)

    # ------------------------------------------------------------------ what forward passes gave

    def watch_output(self, layer: nn.Module) -> None:
        """Keep what the layer gives that gives the outputs of the model, one micro-batch after the other."""
        layer.register_forward_hook(lambda module, arguments, output: self.outputs.append(output.detach().clone()))

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        self.batches, self.outputs = batches, list[Tensor]()
        return super().accumulate(batches)

    def show_update(self, observe: Observe, loss: Tensor) -> None:
        super().show_update(observe, loss)
        for k, (output, batch) in enumerate(zip(self.outputs, self.batches, strict=False)):
            if batch.rows:
                self.show_output(observe, output, batch, k)

    def show_output(self, observe: Observe, output: Tensor, batch: MicroBatch, k: int) -> None:
        """Rows x positions x features, without rows and positions that were filled up."""
        rows, length = batch.valid.shape
        place = self.place(output)
        features = place.box[2] if place.box else (0, output.shape[2])
        box = ((0, rows), (0, length), features)
        own = Place((rows, length, output.shape[2]), box=box, replica=place.replica)
        part = here(output)[:rows, :length]
        show(observe, "output", "output", part, update=self.window.update, microbatch=k, place=own)

    # ------------------------------------------------------------------ where things lie

    def place(self, tensor: Tensor) -> Place:
        """Where a parameter, gradient or moment belongs; copies are numbered by the first rank of each."""
        if not isinstance(tensor, DTensor):
            return Place(tuple(tensor.shape), replica=self.ranks.rank)
        names = tensor.device_mesh.mesh_dim_names or ()
        cut = [n for n, p in zip(names, tensor.placements, strict=True) if not isinstance(p, Replicate)]
        return replace(dtensor_place(tensor), replica=self.layout.copy(self.ranks.rank, *cut))

    def shown(self) -> Iterator[Shown]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter, self.place(parameter)

    def optimizer_state(self) -> Iterator[Shown]:
        for name, tensor, _ in super().optimizer_state():
            yield name, tensor, self.place(tensor)

    # ------------------------------------------------------------------ gradients

    def complete_gradients(self) -> None:
        """Every parameter has a gradient, which lies as it does: parts of sums are added up, before they are used."""
        for _, parameter in self.trainable():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad = gradient

    def own_gradients(self) -> list[Tensor]:
        return [p.grad for _, p in self.trainable() if p.grad is not None]

    def average(self, gradients: list[Tensor]) -> None:
        """Average over the data ranks; all of them hold the same parts of the model."""
        for gradient in gradients:
            local = here(gradient)
            if self.layout.dp > 1:
                dist.all_reduce(local, group=self.data_group())
                local /= self.layout.dp

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.trainable()], limit, order)
        return whole(norm)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
