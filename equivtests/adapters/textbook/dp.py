"""Data parallelism with an explicit all-reduce: every rank holds the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from equivtests.adapters.adapter import PLAIN_FEATURES, Claims, Strategy
from equivtests.adapters.textbook.collectives import all_reduce, any_rank
from equivtests.adapters.textbook.pairs import gather_rows, pair_loss
from equivtests.adapters.textbook.statistics import sum_over_ranks
from equivtests.adapters.torch_adapter import SHOWN, TorchAdapter
from equivtests.cases.windows import MicroBatch
from equivtests.models.batch_norm import BatchNorm
from equivtests.models.parts import Terms

TEXTBOOK_FEATURES = PLAIN_FEATURES | {"balance", "conditional", "dropout", "extra_head", "unused", "z_loss"}
SPANS = frozenset({"window", "microbatch", "rank", "rank-microbatch", "rows"})
TEXTBOOK_OBSERVES = SHOWN | {"loss_scale", "buffer"}


class DataParallel(TorchAdapter):
    """Backward on every rank, one all-reduce of all gradients, the same step everywhere."""

    def claims(self) -> Claims:
        return Claims(
            (
                Strategy(
                    "dp",
                    features=TEXTBOOK_FEATURES | {"batch_norm", "pairs", "running"},
                    precisions=frozenset({"float32", "float64", "float32/bfloat16/float32"}),
                    denominators=SPANS,
                    loss_scale=True,
                    restores=True,
                    observes=TEXTBOOK_OBSERVES,
                    algorithm="all-reduce",
                ),
            ),
            framework="equivtests textbook",
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        if getattr(module, "batch_norm", None) is not None:
            self.synchronize_statistics(cast(BatchNorm, module.batch_norm))
        return super().wrap(module)

    def synchronize_statistics(self, norm: BatchNorm) -> None:
        """A micro-batch number is one batch on all ranks."""
        norm.total = sum_over_ranks

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        """With a lower compute dtype, parameters and inputs are cast and the casts are differentiated."""
        compute = getattr(torch, self.case.precision.compute)
        if compute == self.dtype:
            return super().forward(model, batch)
        return super().forward(Cast(self.module, compute), batch)

    def objective(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        if "pairs" in terms:
            terms = dict(terms)
            pairs = self.pair_term(terms.pop("pairs"))
            return super().objective(terms, k, batch) + pairs
        return super().objective(terms, k, batch)

    def pair_term(self, embeddings: Tensor) -> Tensor:
        """The loss over pairs of all ranks' rows: each rank holds all of it, and the gather's backward adds all copies."""
        weight = self.case.magnitude * 2.0**-6 / int(self.counts.rows.sum())
        return weight * pair_loss(gather_rows(embeddings))

    def synchronize(self) -> None:
        for _, parameter in self.globally_used():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for _, p in self.trainable() if p.grad is not None]
        self.reduce_gradients(gradients)
        self.reduce_buffers()

    def globally_used(self) -> list[tuple[str, Tensor]]:
        """Parameters that some rank has a gradient for: absent everywhere stays absent."""
        named = self.trainable()
        used = any_rank([p.grad is not None for _, p in named], self.ranks.device)
        return [pair for pair, yes in zip(named, used, strict=True) if yes]

    def reduce_gradients(self, gradients: list[Tensor]) -> None:
        """One all-reduce over one flat bucket, then the average that `objective` undoes with its factor W."""
        flat = self.average(_flatten_dense_tensors(gradients))
        for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(reduced)

    def average(self, bucket: Tensor) -> Tensor:
        return all_reduce(bucket).div_(self.ranks.world)

    def reduce_buffers(self) -> None:
        """Running means move by the mean over the rows of all ranks; statistics of a batch norm are of all ranks already."""
        running = getattr(self.module, "running", None)
        if running is not None:
            total = running.mean.new_zeros(len(running.mean)) if running.total is None else running.total
            sums = all_reduce(torch.cat([total, total.new_tensor([running.count])]))
            running.commit(sums[:-1], float(sums[-1]))
        if getattr(self.module, "batch_norm", None) is not None:
            cast(BatchNorm, self.module.batch_norm).commit()

    def save_tensors(self, directory: Path) -> None:
        """Rank 0 writes weights, buffers and optimizer state; all ranks hold the same."""
        if self.ranks.rank == 0:
            save_file(self.tensors(), directory / "model.safetensors")
            save_file(self.state_tensors(), directory / "optimizer.safetensors")

    def tensors(self) -> dict[str, Tensor]:
        named = {n: p for n, p, _ in self.shown()} | dict(self.module.named_buffers())
        return {n: t.detach().contiguous() for n, t in named.items()}

    def state_tensors(self) -> dict[str, Tensor]:
        return {n: t.detach().contiguous() for n, t, _ in self.optimizer_state()}

    def load_tensors(self, directory: Path) -> None:
        self.load_weights(load_file(directory / "model.safetensors"))
        self.load_optimizer(load_file(directory / "optimizer.safetensors"))

    def load_weights(self, saved: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in ({n: p for n, p, _ in self.shown()} | dict(self.module.named_buffers())).items():
                tensor.copy_(saved[name])

    def load_optimizer(self, saved: dict[str, Tensor]) -> None:
        for name, parameter in self.trainable():
            keys = {n.removeprefix(f"{name}/"): t for n, t in saved.items() if n.rpartition("/")[0] == name}
            if keys:
                self.optimizer.state[parameter] = keys


class Cast(nn.Module):
    """A module run with its parameters and float inputs in another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.to_dtype = [module], dtype  # in a list: not a submodule, its parameters are not ours

    def forward(self, inputs: Tensor, *rest: object) -> Terms:
        module = self.inner[0]
        cast = {n: p.to(self.to_dtype) for n, p in module.named_parameters()}
        inputs = inputs.to(self.to_dtype) if inputs.is_floating_point() else inputs
        return torch.func.functional_call(module, cast, (inputs, *rest))
