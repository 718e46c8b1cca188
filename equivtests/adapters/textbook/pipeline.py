"""Pipeline parallelism: the layers cut into stages on different ranks, micro-batches passed from one to the next.

Huang et al. 2019, GPipe, section 2.3; Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters,
section 2.2; Qi et al. 2024, Zero bubble pipeline parallelism, section 2 (the two halves of a backward pass).
The orders are those of `reference.schedules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.places import show
from equivtests.adapters.textbook.lines import Line
from equivtests.adapters.textbook.mesh import Mesh, split_strategy
from equivtests.adapters.torch_adapter import SHOWN
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms
from equivtests.models.staged import Staged
from equivtests.record.observation import Observe
from equivtests.reference.schedules import placement, prescribed
from equivtests.reference.timeline import KIND_CODES, Operation

BEGINNING = frozenset({"embedding", "positions"})
"""What of a model acts before layer 0; what is neither this nor a layer acts after the last one."""

TIED = "embedding.weight"
"""The parameter that both ends of a model use where they are tied; at the end it is named head.weight."""

Turn = tuple[int, int]
"""(stage, micro-batch)."""


def pipeline_strategy(name: str, axes: set[str], schedule: str, **changes: Any) -> Strategy:
    """A strategy of textbook pipeline parallelism, with what all of them share."""
    shared: dict[str, Any] = {
        "families": frozenset({"chain", "mlp", "gpt"}),
        "observes": SHOWN | {"mask", "output", "timeline"},
        "algorithm": "pipeline",
    }
    return split_strategy(name, axes, schedule=schedule, **(shared | changes))


@dataclass(frozen=True)
class Pass:
    """A micro-batch's way through one stage, kept for the backward pass.

    entered: what came from the stage before, a leaf; None on stage 0. left: what went on, (N, L, features), or on the last
    stage the scalar that is differentiated.
    """

    entered: Tensor | None
    left: Tensor


class PipelineParallel(Mesh):
    """Strategies: gpipe, 1f1b and zero-bubble with one stage per rank, the others with two.

    Any number of micro-batches will do where the order is defined for it: a rank waits for what it needs next.
    """

    module: Staged

    def claims(self) -> Claims:
        axes, two = {"dp", "pp"}, frozenset({2})
        return Claims(
            (
                pipeline_strategy("gpipe", axes, "gpipe"),
                pipeline_strategy("1f1b", axes, "1f1b"),
                pipeline_strategy("zero-bubble", axes, "zero-bubble"),
                pipeline_strategy("interleaved-1f1b", axes, "interleaved-1f1b", virtual=two, microbatches="multiple"),
                pipeline_strategy("interleaved-zero-bubble", axes, "zero-bubble", virtual=two, microbatches="multiple"),
                pipeline_strategy("looped-bfs", axes, "looped-bfs", virtual=two),
                pipeline_strategy("zbv", axes, "zbv", virtual=two),
                pipeline_strategy("dualpipev", axes, "dualpipev", virtual=two, microbatches="twice"),
            ),
            framework="equivtests textbook",
        )

    @property
    def schedule(self) -> str:
        """The row of `reference.schedules.SCHEDULES` that the strategy follows."""
        return next(str(s.schedule) for s in self.claims().strategies if s.name == self.strategy)

    # ------------------------------------------------------------------ which stages are here

    def split(self, module: nn.Module) -> None:
        super().split(module)
        self.pipe, self.placement = self.line("pp"), self.place_stages()
        self.layers, self.last = self.layout.layers_of(self.case.model.depth), len(self.placement) - 1
        self.ends = self.line_of_ends()
        for name, _ in list(module.named_parameters(remove_duplicate=False)):
            if self.placement[self.stage_of(name)] != self.pipe.index:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, None)
        for name, laid in self.laid.items():
            if not (name == TIED and self.tied_apart):
                self.lay(name, cut=laid.cut | {"pp"})

    def place_stages(self) -> tuple[int, ...]:
        """The pipeline coordinate of every stage."""
        return placement(self.schedule, self.layout.pp, self.layout.virtual)

    def stage_of(self, name: str) -> int:
        """The stage of a parameter of the whole module."""
        first, *rest = name.split(".")
        if first == self.module.stack:
            return next(stage for stage, layers in enumerate(self.layers) if int(rest[0]) in layers)
        return 0 if first in BEGINNING else self.last

    def rank_of(self, stage: int) -> int:
        """The rank of this pipeline that holds a stage."""
        return self.pipe.ranks[self.placement[stage]]

    @property
    def ends_here(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.placement[-1] == self.pipe.index

    # ------------------------------------------------------------------ a parameter of both ends

    @property
    def tied_apart(self) -> bool:
        """Whether the ends share a parameter and lie on different ranks, so that each has a copy of it."""
        return self.case.model.has("tied") and self.placement[0] != self.placement[-1]

    def canonical(self, name: str) -> str:
        return TIED if name == "head.weight" and self.case.model.has("tied") else name

    def line_of_ends(self) -> Line:
        """The ranks that hold the first and the last stage of this rank's pipeline; a rank between them is alone."""
        groups = []
        for pipe in self.layout.partition("pp"):
            pair = tuple(sorted({pipe[self.placement[0]], pipe[self.placement[-1]]}))
            groups += [pair, *((rank,) for rank in pipe if rank not in pair)]
        group = self.ranks.group(tuple(sorted(groups)))  # made by all ranks together
        ranks = next(ranks for ranks in groups if self.ranks.rank in ranks)
        return Line(group, ranks, ranks.index(self.ranks.rank))

    def sum_partial(self) -> None:
        super().sum_partial()
        if self.tied_apart:
            self.sum_tied([p.grad for name, p in self.trainable() if name == TIED and p.grad is not None])

    def sum_tied(self, gradients: list[Tensor]) -> None:
        """Each copy of a tied parameter has the gradient of one of its uses."""
        self.sum_over(self.ends, gradients)

    # ------------------------------------------------------------------ one window

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        """All operations of this rank. Returns the loss on the ranks of the last stage, zero on the others."""
        self.batches, self.loss = batches, torch.zeros((), dtype=torch.float64)
        self.passed: dict[Turn, Pass] = {}
        self.pulled: dict[Turn, Tensor | None] = {}
        self.handed: dict[int, Tensor] = {}
        self.sending: list[tuple[Any, Tensor]] = []
        self.begun: dict[int, Tensor] = {}
        self.ran: list[tuple[int, int, int, int]] = []
        for operation in self.operations():
            self.perform(operation)
        self.finish_sending()
        return self.loss

    def operations(self) -> tuple[Operation, ...]:
        """What this rank runs, in this order."""
        P, V, M = self.layout.pp, self.layout.virtual, len(self.batches)
        return prescribed(self.schedule, P, V, M)[self.pipe.index]

    def perform(self, operation: Operation) -> None:
        """Run one operation, and note it with the version of the weights that it used."""
        steps = {
            "F": self.forward_stage,
            "B": self.backward_stage,
            "I": self.backward_inputs,
            "W": self.backward_weights,
        }
        steps[operation.kind](operation.stage, operation.microbatch)
        self.ran.append(self.noted(operation))

    def noted(self, operation: Operation) -> tuple[int, int, int, int]:
        """The row of the timeline of an operation that has just run."""
        return KIND_CODES[operation.kind], operation.stage, operation.microbatch, self.steps

    # ------------------------------------------------------------------ forward

    def forward_stage(self, stage: int, k: int) -> None:
        self.passing = k
        inputs = self.to_device(self.batches[k].inputs)
        entered = self.recv_forward(stage, k) if stage else None
        x = self.begin(inputs, k) if entered is None else entered
        for layer in self.layers[stage]:
            x = self.module.layer(layer, x, inputs)
        if stage == self.last:
            x = self.end(x, k)
        else:
            self.send_forward(stage, k, x)
        self.passed[stage, k] = Pass(entered, x)

    def begin(self, inputs: Tensor, k: int) -> Tensor:
        self.begun[k] = inputs.detach().cpu()
        return self.module.begin(inputs, self.to_device(self.batches[k].ids))

    def end(self, x: Tensor, k: int) -> Tensor:
        """Add to the loss; returns what is differentiated."""
        batch, move = self.labels(k), self.to_device
        if self.output_layer() is None:
            self.keep("output", x.detach().clone())
        terms = self.module.end(x, move(batch.targets), move(batch.valid), batch.conditional)
        self.loss += self.objective(terms, k, batch).detach().double().cpu()
        return self.differentiated(terms, k, batch) * self.loss_scale

    def labels(self, k: int) -> MicroBatch:
        """The micro-batch whose targets belong to what leaves the last layer as number `k`."""
        return self.batches[k]

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        """What backward passes start from: the objective, divided before them and once."""
        return self.objective(terms, k, batch)

    # ------------------------------------------------------------------ backward

    def backward_stage(self, stage: int, k: int) -> None:
        """The gradients of weights and of what entered, at once."""
        passed, gradient = self.passed.pop((stage, k)), self.output_gradient(stage, k)
        if passed.left.requires_grad:
            torch.autograd.backward(passed.left, gradient)
        if passed.entered is not None and passed.entered.grad is not None:
            self.send_backward(stage, k, passed.entered.grad)

    def backward_inputs(self, stage: int, k: int) -> None:
        """The gradient of what entered, which the stage before waits for."""
        passed = self.passed[stage, k]
        gradient = self.pulled[stage, k] = self.output_gradient(stage, k)
        if passed.entered is not None:
            (entered,) = torch.autograd.grad(passed.left, passed.entered, gradient, retain_graph=True)
            self.send_backward(stage, k, entered)

    def backward_weights(self, stage: int, k: int) -> None:
        """The gradients of weights, for which nobody waits."""
        for weight, gradient in zip(self.weights(), self.weight_gradients(stage, k), strict=True):
            if gradient is not None:
                self.add_gradient(stage, weight, gradient)

    def weights(self) -> list[Tensor]:
        return [p for _, p in self.trainable()]

    def weight_gradients(self, stage: int, k: int) -> list[Tensor | None]:
        """Gradients of `weights()` from one micro-batch in one stage; None for weights of other stages."""
        left, gradient = self.passed.pop((stage, k)).left, self.pulled.pop((stage, k))
        weights = self.weights()
        if not weights or not left.requires_grad:
            return [None] * len(weights)
        return list(torch.autograd.grad(left, weights, gradient, allow_unused=True))

    def add_gradient(self, stage: int, weight: Tensor, gradient: Tensor) -> None:
        weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def output_gradient(self, stage: int, k: int) -> Tensor | None:
        """The gradient of what left a stage; None on the last stage, where it is 1."""
        return None if stage == self.last else self.recv_backward(stage, k)

    # ------------------------------------------------------------------ messages

    def send_forward(self, stage: int, k: int, x: Tensor) -> None:
        self.send(x, stage + 1, self.tag(stage + 1, k, forward=True))

    def recv_forward(self, stage: int, k: int) -> Tensor:
        """What enters a stage, as a leaf."""
        return self.receive(stage - 1, stage, k, forward=True).requires_grad_()

    def send_backward(self, stage: int, k: int, gradient: Tensor) -> None:
        self.send(gradient, stage - 1, self.tag(stage - 1, k, forward=False))

    def recv_backward(self, stage: int, k: int) -> Tensor:
        return self.receive(stage + 1, stage, k, forward=False)

    def tag(self, stage: int, k: int, forward: bool) -> int:
        """A number of its own for every message of a window to a stage, so that none is taken for another."""
        return (2 * k + forward) * len(self.placement) + stage

    def send(self, tensor: Tensor, stage: int, tag: int) -> None:
        """Start to send to the rank of a stage, without waiting: no order of two ranks' operations can lock them."""
        tensor = tensor.detach().contiguous()
        if self.rank_of(stage) == self.ranks.rank:
            self.handed[tag] = tensor
        elif tensor.numel():
            self.sending.append((dist.isend(tensor, self.rank_of(stage), tag=tag), tensor))

    def receive(self, source: int, stage: int, k: int, forward: bool) -> Tensor:
        """Wait for what the rank of the stage `source` sends to `stage`."""
        tag = self.tag(stage, k, forward)
        if self.rank_of(source) == self.ranks.rank:
            return self.handed.pop(tag)
        boundary = max(source, stage)  # between this stage and the one before
        tensor = torch.empty(self.shape_before(boundary, k), dtype=self.dtype, device=self.ranks.device)
        if tensor.numel():
            dist.recv(tensor, self.rank_of(source), tag=tag)
        return tensor

    def finish_sending(self) -> None:
        for work, _ in self.sending:
            work.wait()

    def shape_before(self, stage: int, k: int) -> tuple[int, int, int]:
        """Shape of what enters a stage: rows, positions, features."""
        rows, length = self.batches[k].inputs.shape[:2]
        return rows, self.positions_here(length), self.features_before(self.layers[stage].start)

    def positions_here(self, length: int) -> int:
        """How many positions of a sequence stand between the layers of this rank."""
        return int(length)

    def features_before(self, layer: int) -> int:
        """Features of what enters a layer, or after the last one leaves it."""
        model = self.case.model
        if model.family == "mlp" and layer in (0, model.depth):
            return model.outputs if layer else model.inputs
        return 1 if model.family == "chain" else model.width

    # ------------------------------------------------------------------ showing

    def show_update(self, observe: Observe, loss: Tensor) -> None:
        super().show_update(observe, loss)
        rows = np.array(self.ran, dtype=np.int64).reshape(-1, 4)
        observe("timeline", "timeline", rows, update=self.window.update)

    def show_inputs(self, observe: Observe) -> None:
        """What reached stage 0."""
        for k, inputs in sorted(self.begun.items()):
            if len(inputs):
                show(observe, "inputs", "inputs", inputs, update=self.window.update, microbatch=k)

    def show_loss(self, observe: Observe, loss: Tensor) -> None:
        """Only the ranks of the last stage know it."""
        if self.ends_here:
            super().show_loss(observe, loss)
