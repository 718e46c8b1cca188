"""torch.distributed.pipelining with all of its schedules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.native.mesh import SplitModel, here, whole
from equivtests.adapters.native.stages import Stage
from equivtests.adapters.places import show
from equivtests.adapters.torch_adapter import SHOWN, Shown
from equivtests.cases.windows import MicroBatch
from equivtests.models.staged import Staged
from equivtests.record.observation import Observe, Place
from equivtests.reference.schedules import placement
from equivtests.reference.timeline import KIND_CODES

SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpipe": (torch_schedules.ScheduleGPipe, {}),
    "1f1b": (torch_schedules.Schedule1F1B, {"microbatches": "stages"}),
    "interleaved-1f1b": (torch_schedules.ScheduleInterleaved1F1B, {"microbatches": "multiple", "virtual": {2}}),
    "looped-bfs": (torch_schedules.ScheduleLoopedBFS, {"virtual": {2}}),
    "zero-bubble": (torch_schedules.ScheduleInterleavedZeroBubble, {"microbatches": "multiple", "virtual": {2}}),
    "zbv": (torch_schedules.ScheduleZBVZeroBubble, {"virtual": {2}}),
    "dualpipev": (torch_schedules.ScheduleDualPipeV, {"microbatches": "twice", "virtual": {2}}),
}
"""torch's class, and what it takes, by schedule."""

Key = tuple[int, tuple[int, ...]]
"""Number of micro-batches, and the shape of each."""


def pipeline_strategy(name: str, schedule: str, **changes: Any) -> Strategy:
    """A strategy that runs one of torch's schedules."""
    options = SCHEDULES[schedule][1]
    shared: dict[str, Any] = {
        "worlds": frozenset(range(1, 17)),
        "axes": frozenset({"dp", "pp"}),
        "schedule": schedule,
        "families": frozenset({"chain", "mlp", "gpt"}),
        "features": frozenset({"bias", "dropout", "extra_head", "gated", "packed", "qk_norm", "shared_kv", "smoothing"})
        | {"tied", "z_loss"},
        "observes": SHOWN | {"output", "timeline"},
        "restores": True,
        "microbatches": options.get("microbatches", "any"),
        "virtual": frozenset(options.get("virtual", {1})),
    }
    return Strategy(name, **(shared | changes))


class Pipeline(SplitModel):
    """Stages of the module, run by `schedule.step`. Data ranks, if there are several, are averaged by hand.

    The loss is a sum over tokens divided by those of the window, so schedules must not divide gradients by the number of
    micro-batches (`scale_grads`). `step` cuts one batch into equal micro-batches: shorter ones are filled up, with rows and
    positions that no loss looks at.
    """

    scale_grads = False

    def claims(self) -> Claims:
        strategies = tuple(pipeline_strategy(f"torch-{name}", name, algorithm="pipeline-filled") for name in SCHEDULES)
        return Claims(strategies, framework=f"torch {torch.__version__}")

    # ------------------------------------------------------------------ stages

    @property
    def schedule_name(self) -> str:
        return next(s.schedule for s in self.claims().strategies if s.name == self.strategy and s.schedule)

    def watch_inputs(self, module: nn.Module) -> None:
        """Only the first stage is fed inputs."""
        self.fed: list[Tensor] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        """Keep the stages that the schedule places here."""
        self.holders = placement(self.schedule_name, self.layout.pp, self.layout.virtual)
        self.cut_layers(module)
        self.tied = self.case.model.has("tied")
        if self.tied and self.holders[0] != self.holders[-1]:
            module.set_submodule("head", copy.deepcopy(module.get_submodule("head")))
        own = self.layout.at(self.ranks.rank)["pp"]
        numbers = [s for s, rank in enumerate(self.holders) if rank == own]
        self.stages = {s: self.stage(module, s) for s in numbers}
        self.wrapped = {s: self.wrap_stage(stage) for s, stage in self.stages.items()}
        self.pipelines: dict[Key, tuple[Any, list[PipelineStage]]] = {}
        self.module = nn.ModuleList(self.stages.values())  # what this rank holds
        return self.module

    def cut_layers(self, module: nn.Module) -> None:
        """Cut every layer over other ranks than those of the pipeline, before stages are made of the layers."""

    def stage(self, module: nn.Module, number: int) -> Stage:
        assert isinstance(module, Staged)
        last = self.layout.stage_count - 1
        stage = Stage(module, self.layout.layers_of(module.depth)[number], number == 0, number == last)
        if number == 0:
            stage.register_forward_pre_hook(lambda _, arguments: self.fed.append(arguments[0].detach().cpu()))
        if number == last:
            self.watch_output(stage.get_submodule("head" if self.case.model.decoder else "given"))
        return stage

    def wrap_stage(self, stage: Stage) -> nn.Module:
        """The framework's data parallelism around one stage."""
        return stage

    @property
    def begins(self) -> bool:
        return 0 in self.stages

    @property
    def ends(self) -> bool:
        return self.layout.stage_count - 1 in self.stages

    # ------------------------------------------------------------------ one update

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        """One step of the schedule runs all micro-batches forward and backward."""
        self.batches, self.outputs, self.timeline = batches, list[Tensor](), list[tuple[int, int, int, int]]()
        fields = self.filled_up(batches)
        losses: list[Tensor] = []
        schedule = self.pipeline(len(batches), fields["inputs"])
        arguments = (fields["inputs"],) if self.begins else ()
        numbers = torch.arange(len(batches)) if self.ends else None
        schedule.step(*arguments, target=numbers, losses=losses if self.ends else None, return_outputs=False, **fields)
        return sum((loss.detach().double().cpu() for loss in losses), torch.zeros((), dtype=torch.float64))

    def filled_up(self, batches: list[MicroBatch]) -> dict[str, Tensor]:
        """Inputs, targets, valid and ids of all micro-batches, one after the other, each with as many rows and positions."""
        rows = max(1, *(batch.rows for batch in batches))
        length = max(batch.valid.shape[1] for batch in batches)
        fields: dict[str, Tensor] = {}
        for name in ("inputs", "targets", "valid", "ids"):
            arrays = [getattr(batch, name) for batch in batches]
            filled = [fill_up(array, (rows, length)[: min(2, array.ndim)]) for array in arrays]
            fields[name] = self.to_device(np.concatenate(filled))
        return fields

    def pipeline(self, count: int, inputs: Tensor) -> Any:
        """The schedule for `count` micro-batches of this shape; torch fixes shapes at the first step."""
        key = (count, tuple(inputs.shape))
        if key not in self.pipelines:
            stages = [self.torch_stage(s, inputs[: len(inputs) // count]) for s in self.stages]
            kind = SCHEDULES[self.schedule_name][0]
            single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
            schedule = kind(stages[0] if single else stages, count, loss_fn=self.loss_of, scale_grads=self.scale_grads)
            self.pipelines[key] = schedule, stages
        return self.pipelines[key][0]

    def torch_stage(self, number: int, inputs: Tensor) -> PipelineStage:
        """A stage whose inputs and outputs are said by example, so that torch need not run the module to learn them."""
        between = inputs.new_zeros(self.between(inputs), dtype=self.dtype).requires_grad_()
        last = number == self.layout.stage_count - 1
        losses = torch.zeros(self.term_count, dtype=self.dtype, device=self.ranks.device)
        stage = PipelineStage(
            self.wrapped[number], number, self.layout.stage_count, torch.device(self.ranks.device),
            input_args=inputs if number == 0 else between, output_args=losses.requires_grad_() if last else between,
            group=self.pipeline_group(),
        )  # fmt: skip
        self.watch_operations(stage)
        return stage

    def between(self, inputs: Tensor) -> tuple[int, int, int]:
        """Shape of what one stage gives to the next."""
        return (inputs.shape[0], inputs.shape[1], 1 if self.case.model.family == "chain" else self.case.model.width)

    @property
    def term_count(self) -> int:
        return 1 + self.case.model.has("extra_head") + self.case.model.has("z_loss")

    def pipeline_group(self) -> Any:
        return self.ranks.group(self.layout.partition("pp"))

    def loss_of(self, terms: Tensor, number: Tensor) -> Tensor:
        """What is differentiated for one micro-batch: its terms, and the number that it bears, as the target."""
        k, last = int(number), self.stages[self.layout.stage_count - 1]
        return self.objective(dict(zip(last.terms, terms, strict=True)), k, self.batches[k])

    def watch_operations(self, stage: PipelineStage) -> None:
        """Note what the schedule really runs, in the order in which it does."""
        forward, backward, weights = (
            stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk,
        )  # fmt: skip

        def forward_one_chunk(k: int, *arguments: Any, **options: Any) -> Any:
            self.note("F", stage, k)
            return forward(k, *arguments, **options)

        def backward_one_chunk(
            k: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> Any:
            self.note("B" if full_backward else "I", stage, k)
            return backward(k, loss=loss, full_backward=full_backward, last_backward=last_backward)

        def backward_weight_one_chunk(k: int, last_backward: bool = False) -> Any:
            self.note("W", stage, k)
            return weights(k, last_backward=last_backward)

        replaced: list[Callable[..., Any]] = [forward_one_chunk, backward_one_chunk, backward_weight_one_chunk]
        for function in replaced:
            setattr(stage, function.__name__, function)

    def note(self, kind: str, stage: PipelineStage, k: int) -> None:
        self.timeline.append((KIND_CODES[kind], stage.stage_index, k, self.steps))

    # ------------------------------------------------------------------ gradients

    def synchronize(self) -> None:
        self.complete_gradients()
        self.sum_tied()
        self.average_stages()

    def average_stages(self) -> None:
        """Over the data ranks."""
        self.average(self.own_gradients())

    def sum_tied(self) -> None:
        """Two copies of a tied embedding each have a part of its gradient; if one rank holds both, it is one parameter."""
        if not self.tied or self.holders[0] == self.holders[-1]:
            return
        parts = [part for ranks in self.layout.partition("pp") for part in self.ends_of(ranks)]
        group = self.ranks.group(tuple(sorted(parts)))
        if self.begins or self.ends:
            gradient = next(p.grad for name, p in self.trainable() if name == "embedding.weight")
            assert gradient is not None
            dist.all_reduce(here(gradient), group=group)

    def ends_of(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The ranks of a pipeline, apart: those with the first and the last stage, and the others."""
        ordered = sorted(ranks, key=lambda rank: self.layout.at(rank)["pp"])
        pair = {ordered[self.holders[0]], ordered[self.holders[-1]]}
        return [part for part in (tuple(sorted(pair)), tuple(sorted(set(ranks) - pair))) if part]

    def gradient_norm(self, order: float) -> Tensor:
        """Over all stages, each element once: a tied embedding counts on the first."""
        own = [p.grad for p in self.counted() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(own, order)).to(self.ranks.device)
        power = norm if order == math.inf else norm**order
        dist.all_reduce(
            power, dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM, group=self.pipeline_group()
        )
        return power if order == math.inf else power ** (1 / order)

    def counted(self) -> list[Tensor]:
        twice = self.tied and not self.begins
        return [p for name, p in self.trainable() if not (twice and name == "embedding.weight")]

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        norm = self.gradient_norm(order)
        torch.nn.utils.clip_grads_with_norm_([p for _, p in self.trainable()], limit, norm)
        return norm

    # ------------------------------------------------------------------ showing

    def shown(self) -> Iterator[Shown]:
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self.canonical(name), parameter, self.place(parameter)

    def canonical(self, name: str) -> str:
        return "embedding.weight" if self.tied and name == "head.weight" else name

    def show_inputs(self, observe: Observe) -> None:
        """What reached the first stage, without what was filled up."""
        for k, (inputs, batch) in enumerate(zip(self.fed, self.batches, strict=False)):
            if batch.rows:
                own = inputs[: batch.rows, : batch.valid.shape[1]]
                show(observe, "inputs", "inputs", own, update=self.window.update, microbatch=k)
        self.fed.clear()

    def show_loss(self, observe: Observe, loss: Tensor) -> None:
        if self.ends:
            super().show_loss(observe, loss)
        rows = np.array(self.timeline, dtype=np.int64).reshape(-1, 4)
        place = Place(rows.shape, replica=self.ranks.rank)
        observe("timeline", "timeline", rows, update=self.window.update, place=place)

    # ------------------------------------------------------------------ checkpoints

    def save_tensors(self, directory: Path) -> None:
        weights = {name: p.detach() for name, p, _ in self.shown()}
        torch.save([weights, self.optimizer.state_dict()], directory / f"rank-{self.ranks.rank}.pt")

    def load_tensors(self, directory: Path) -> None:
        weights, optimizer = torch.load(directory / f"rank-{self.ranks.rank}.pt", weights_only=True)
        with torch.no_grad():
            for name, parameter, _ in self.shown():
                parameter.copy_(weights[name])
        self.optimizer.load_state_dict(optimizer)


def fill_up(array: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """The array with zeros behind it, up to the sizes of its first dimensions."""
    missing = [(0, n - have) for n, have in zip(size, array.shape, strict=False)]
    return np.pad(array, missing + [(0, 0)] * (array.ndim - len(missing)))
