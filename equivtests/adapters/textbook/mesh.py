"""One model on a mesh of ranks: what all axes share.

Every axis is a class of its own over `Mesh` (`TensorParallel`, `ContextParallel`, `ExpertParallel`, `PipelineParallel`); a
product is a class that has several of them as bases. An axis of one rank changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from equivtests.adapters.adapter import Strategy
from equivtests.adapters.context import Ranks
from equivtests.adapters.places import show
from equivtests.adapters.textbook.collectives import any_rank
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.lines import Line
from equivtests.adapters.torch_adapter import SHOWN, Shown
from equivtests.cases.case import Case
from equivtests.cases.parameters import parameters
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Observe, Place

SPLIT_WORLDS = frozenset(range(1, 17))
SPLIT_FEATURES = frozenset(
    {"bias", "dropout", "extra_head", "gated", "packed", "qk_norm", "shared_kv", "smoothing", "tied", "z_loss"}
)


def split_strategy(name: str, axes: set[str], **changes: Any) -> Strategy:
    """A strategy of textbook model parallelism, with what all of them share."""
    shared: dict[str, Any] = {
        "worlds": SPLIT_WORLDS,
        "axes": frozenset(axes),
        "families": frozenset({"gpt"}),
        "features": SPLIT_FEATURES,
        "restores": True,
        "observes": SHOWN | {"mask", "output"},
    }
    return Strategy(name, **(shared | changes))


@dataclass(frozen=True)
class Laid:
    """How a parameter lies on the mesh.

    shape: of the whole; box: (start, stop) per dimension of the part that is here, None for all of it. cut: axes whose ranks
    hold different parts. partial: axes whose ranks each have a part of the gradient's sum.
    """

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...] | None = None
    cut: frozenset[str] = frozenset()
    partial: tuple[str, ...] = ()


class Mesh(DataParallel):
    """Data parallelism over the data ranks (dp · cp); the axes cut the module in `split`, and note it in `laid`."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self.layout = self.case.layout
        self.laid = {name: Laid(tuple(p.shape)) for name, p in module.named_parameters()}
        self.split(module)
        return module

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.passing, self.kept = 0, list[tuple[str, int, Tensor]]()
        dropout = getattr(self.module, "dropout", None)
        if dropout is not None:
            dropout.watch = lambda site, mask: self.keep("mask", mask, site)
        last = self.output_layer()
        if last is not None:
            last.register_forward_hook(lambda module, arguments, output: self.keep("output", output.detach().clone()))

    def split(self, module: nn.Module) -> None:
        """Cut the module, one axis after the other: an axis calls super().split() first."""

    # ------------------------------------------------------------------ the mesh

    def line(self, *axes: str) -> Line:
        """This rank's group along one axis, or along several together."""
        ranks = self.layout.group(self.ranks.rank, *axes)
        group = self.ranks.group(self.layout.partition(*axes)) if len(ranks) > 1 else None
        return Line(group, ranks, ranks.index(self.ranks.rank))

    def data_group(self) -> Any:
        return self.ranks.group(self.layout.partition("dp"))

    def averaged(self) -> int:
        return self.layout.dp * self.layout.cp

    def copy(self, *cut: str) -> int:
        """Number of the copy that this rank holds part of, of what is cut over these axes."""
        return self.layout.copy(self.ranks.rank, *cut)

    def loss_place(self) -> Place:
        return Place((), replica=self.copy("dp", "cp"), partial="mean", parts=self.averaged())

    # ------------------------------------------------------------------ what forward passes did

    def output_layer(self) -> nn.Module | None:
        """The layer of this rank that gives the outputs of the model, if it has one."""
        names = {"linear": "linear", "gated_mlp": "down", "mlp": f"layers.{self.case.model.depth - 1}"}
        name = names.get(self.case.model.family, "head")
        return dict(self.module.named_modules()).get(name)

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.passing = k
        return super().forward_backward(k, batch, last)

    def keep(self, kind: str, tensor: Tensor, site: str = "output") -> None:
        """Note what the forward pass of the micro-batch `passing` did; it is shown with the update."""
        self.kept.append((kind if kind == "output" else f"{kind}/{site}", self.passing, tensor))

    def show_update(self, observe: Observe, loss: Tensor) -> None:
        super().show_update(observe, loss)
        for label, k, tensor in self.kept:
            kind, _, site = label.partition("/")
            if len(tensor):
                self.show_pieces(observe, kind, site or kind, tensor, k)
        self.kept.clear()

    def show_pieces(self, observe: Observe, kind: str, name: str, tensor: Tensor, k: int) -> None:
        """Show (rows, positions here, features here), each contiguous piece of the sequence by itself."""
        pieces = self.mask_pieces(k) if kind == "mask" else self.pieces(k)
        features = self.output_span() if kind == "output" else None
        shape = (len(tensor), self.case.length(k), features[2] if features else tensor.shape[2])
        span = features[:2] if features else (0, shape[2])
        replica = self.copy(*(axis for axis in ("cp", "tp") if self.cuts(kind, axis)))
        for part, piece in zip(tensor.split([b - a for a, b in pieces], dim=1), pieces, strict=True):
            place = Place(shape, box=((0, len(tensor)), piece, span), replica=replica)
            show(observe, kind, name, part, update=self.window.update, microbatch=k, place=place)

    def pieces(self, k: int) -> list[tuple[int, int]]:
        """(start, stop) of the contiguous pieces of every sequence of micro-batch `k` that are here, in order."""
        return [(0, self.case.length(k))]

    def mask_pieces(self, k: int) -> list[tuple[int, int]]:
        """The same where dropout acts."""
        return self.pieces(k)

    def output_span(self) -> tuple[int, int, int] | None:
        """(start, stop, all) of the output features here; None: all of them."""
        return None

    def cuts(self, kind: str, axis: str) -> bool:
        """Whether the ranks along an axis have different parts of what is shown."""
        return axis == "cp"

    # ------------------------------------------------------------------ parameters

    def lay(self, name: str, **changes: Any) -> None:
        """Note how a parameter lies on the mesh."""
        self.laid[name] = replace(self.laid[name], **changes)

    def canonical(self, name: str) -> str:
        """The canonical name of a parameter of the module as it is cut."""
        return name

    def shown(self) -> Iterator[Shown]:
        for own_name, parameter in self.module.named_parameters():
            name = self.canonical(own_name)
            laid = self.laid[name]
            yield name, parameter, Place(laid.shape, laid.box, replica=self.copy(*sorted(laid.cut)))

    def globally_used(self) -> list[tuple[str, Tensor]]:
        """Parameters of this rank that some rank of the whole mesh has a gradient for."""
        here = dict(self.trainable())
        names = [p.name for p in parameters(self.case.model)]
        used = any_rank([n in here and here[n].grad is not None for n in names], self.ranks.device)
        return [(n, here[n]) for n, yes in zip(names, used, strict=True) if yes and n in here]

    # ------------------------------------------------------------------ gradients

    def synchronize(self) -> None:
        for _, parameter in self.globally_used():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.sum_partial()
        self.average_data()

    def sum_partial(self) -> None:
        """Add up gradients whose parts lie along an axis: of norms and biases that saw parts of a sequence or some heads."""
        for axes in sorted({laid.partial for laid in self.laid.values() if laid.partial}):
            self.sum_over(self.line(*axes), self.gradients_of(lambda laid, axes=axes: laid.partial == axes))

    def average_data(self) -> None:
        """Average over all data ranks; experts are shared by fewer of them, but their tokens came from all."""
        self.sum_over(self.line("dp", "cp"), self.gradients_of(lambda laid: "ep" not in laid.cut))
        self.sum_over(self.line("edp"), self.gradients_of(lambda laid: "ep" in laid.cut))
        for gradient in self.gradients_of(lambda laid: True):
            gradient.div_(self.averaged())

    def gradients_of(self, chosen: Any) -> list[Tensor]:
        """The gradients of the parameters here whose `Laid` is chosen."""
        return [p.grad for name, p in self.trainable() if p.grad is not None and chosen(self.laid[name])]

    def sum_over(self, line: Line, gradients: list[Tensor]) -> None:
        """One all-reduce of one flat bucket."""
        if gradients and line.size > 1:
            flat = line.sum(_flatten_dense_tensors(gradients))
            for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(total)

    def gradient_norm(self, order: float) -> Tensor:
        """Every element once: of what several ranks hold, the first copy counts."""
        own = [g.flatten() for name, g, _ in self.gradients() if self.counts_here(name)]
        flat = torch.cat([*own, torch.zeros(1, dtype=self.dtype, device=self.ranks.device)])
        everyone = self.line("world")
        if order == math.inf:
            return everyone.max(torch.linalg.vector_norm(flat, order))
        return everyone.sum((flat * flat).sum()).sqrt()

    def counts_here(self, name: str) -> bool:
        """Whether this rank's part of a parameter is of the first copy."""
        return self.copy(*sorted(self.laid[name].cut)) == 0

    # ------------------------------------------------------------------ checkpoints: every rank writes what it holds

    def save_tensors(self, directory: Path) -> None:
        held = {f"weight/{n}": p.detach().contiguous() for n, p, _ in self.shown()}
        state = {f"state/{n}": t.detach().contiguous() for n, t, _ in self.optimizer_state()}
        save_file(held | state, directory / f"rank-{self.ranks.rank}.safetensors")

    def load_tensors(self, directory: Path) -> None:
        saved = load_file(directory / f"rank-{self.ranks.rank}.safetensors")
        with torch.no_grad():
            for name, parameter, _ in self.shown():
                parameter.copy_(saved[f"weight/{name}"])
        self.load_optimizer({n.removeprefix("state/"): t for n, t in saved.items() if n.startswith("state/")})
