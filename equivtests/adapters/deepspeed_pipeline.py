"""DeepSpeed: PipelineModule, whose engine owns the loop over micro-batches and the step.

Written like its documentation: https://deepspeed.readthedocs.io/en/stable/pipeline.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims
from equivtests.adapters.deepspeed import SIZES, DeepSpeed
from equivtests.adapters.deepspeed_claims import pipeline_strategies
from equivtests.adapters.deepspeed_pipeline_models import parts_of
from equivtests.adapters.native.pipeline import fill_up
from equivtests.adapters.torch_adapter import Shown
from equivtests.cases.windows import MicroBatch
from equivtests.models.staged import Staged
from equivtests.record.observation import Observe, Place
from equivtests.reference.timeline import KIND_CODES

AXES = {"pp": "pipe", "dp": "data"}


class DeepSpeedPipeline(DeepSpeed):
    """One call of train_batch runs a window: 1F1B, tied gradients, data ranks, clipping, step, schedule."""

    def claims(self) -> Claims:
        return Claims(
            pipeline_strategies(),
            framework=f"deepspeed {deepspeed.__version__}",
            preload=("deepspeed.runtime.zero.muon.muon_optimizer",),
            mutants=("equivtests.mutants.outside.deepspeed_pipeline",),
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        """Each stage of the layout has its layers; the beginning is before the first, and the end behind the last."""
        assert isinstance(module, Staged)
        self.whole, layout, model = module, self.case.layout, self.case.model
        self.names = {id(p): name for name, p in module.named_parameters()}
        deepspeed.init_distributed(dist_backend=self.ranks.backend)
        axes = [axis for axis in layout.order if axis in AXES]
        layers = parts_of(module, layout.layers_of(module.depth), model.family == "gpt", model.has("tied"))
        self.module = PipelineModule(
            layers, topology=ProcessTopology([AXES[a] for a in axes], [layout.degree(a) for a in axes]),
            loss_fn=self.loss_of, partition_method="type:Layers", dynamic_shape=True,
        )  # fmt: skip
        return self.module

    def zero_options(self) -> dict[str, Any]:
        return SIZES | {"stage": int(self.strategy.endswith("zero1"))}

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        watched = {schedule.ForwardPass: self.forward_pass, schedule.BackwardPass: self.backward_pass}
        watched |= {schedule.OptimizerStep: self.optimizer_pass}
        self.engine._INSTRUCTION_MAP = self.engine._INSTRUCTION_MAP | watched
        return optimizer

    # ------------------------------------------------------------------ one update

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        """The loss that train_batch returns is the mean over micro-batches and data ranks."""
        self.batches, self.timeline = batches, list[tuple[int, int, int, int]]()
        self.engine.set_train_batch_size(len(batches) * self.case.layout.dp)  # may be fewer than configured
        return self.engine.train_batch(self.fields(k, batch) for k, batch in enumerate(batches)).cpu()

    def fields(self, k: int, batch: MicroBatch) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What the first stage is fed, and what the loss function is; a micro-batch has one row at least."""
        rows = (max(1, batch.rows),)
        arrays = [fill_up(a, rows) for a in (batch.inputs, batch.ids, batch.targets, batch.valid)]
        inputs, ids, targets, valid = (self.to_device(array) for array in arrays)
        return (inputs, ids), (targets, valid, torch.tensor(k))

    def loss_of(self, x: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
        """The engine takes the mean over micro-batches."""
        targets, valid, k = labels
        terms = self.whole.end(x, targets, valid, False)
        return self.objective(terms, int(k), self.batches[int(k)]) * len(self.batches)

    def forward_pass(self, engine: PipelineEngine, buffer_id: int) -> None:
        if engine.is_first_stage():
            self.fed.append(engine.pipe_buffers["inputs"][buffer_id][0])
        self.note("F", engine)
        PipelineEngine._exec_forward_pass(engine, buffer_id)

    def backward_pass(self, engine: PipelineEngine, buffer_id: int) -> None:
        self.note("B", engine)
        PipelineEngine._exec_backward_pass(engine, buffer_id)

    def optimizer_pass(self, engine: PipelineEngine) -> None:
        """Keep what there is to show before the step."""
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.kept = [(name, safe_get_full_grad(p).clone(), place) for name, p, place in self.shown()]
        PipelineEngine._exec_optimizer_step(engine)

    def note(self, kind: str, engine: PipelineEngine) -> None:
        """Passes of one kind run in the order of micro-batches."""
        code = KIND_CODES[kind]
        k = sum(noted == code for noted, *_ in self.timeline)
        self.timeline.append((code, engine.stage_id, k, self.steps))

    def optimizer_step(self) -> None:
        """train_batch has made it."""

    # ------------------------------------------------------------------ who is fed what, and showing

    def data_group(self) -> Any:
        return self.ranks.group(self.case.layout.partition("dp"))

    def averaged(self) -> int:
        return self.case.layout.dp

    def loss_place(self) -> Place:
        return Place((), replica=self.ranks.rank)

    def watch_inputs(self, module: nn.Module) -> None:
        self.fed: list[Tensor] = []

    def shown(self) -> Iterator[Shown]:
        for parameter in self.module.parameters():
            yield self.names[id(parameter)], parameter, Place(tuple(parameter.shape), replica=self.ranks.rank)

    def gradients(self) -> Iterator[Shown]:
        yield from self.kept

    def show_inputs(self, observe: Observe) -> None:
        """Without the rows that were filled up."""
        self.fed = [inputs[: batch.rows] for inputs, batch in zip(self.fed, self.batches, strict=False)]
        super().show_inputs(observe)

    def show_rate(self, observe: Observe) -> None:
        place = Place((), replica=self.ranks.rank)
        observe("lr", "lr", np.float64(self.rate), update=self.window.update, place=place)
        rows = np.array(self.timeline, dtype=np.int64).reshape(-1, 4)
        place = Place(rows.shape, replica=self.ranks.rank)
        observe("timeline", "timeline", rows, update=self.window.update, place=place)
