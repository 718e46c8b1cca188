"""Mutants of the DeepSpeed adapter: what its users write, and what its configuration does behind their backs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equivtests.adapters.deepspeed import DeepSpeed
from equivtests.cases.grid import REAL_LINEAR
from equivtests.cases.windows import MicroBatch
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import CLIPPED_SHARDS, MIDDLE, SHORT_TAIL, THREES, TWO_BY_THREE, situation
from equivtests.record.observation import Observe

LARGE = situation("gradients-above-one", REAL_LINEAR, THREES, magnitude=2.0**6)


@mutant(
    "deepspeed-own-means",
    strategy="deepspeed-zero2",
    case=TWO_BY_THREE,
    quantity="loss",
    source="allenai/open-instruct#1736; huggingface/transformers#34191",
    mistake="the mean over a micro-batch's own tokens is handed to the engine, which averages over micro-batches and ranks",
)
class OwnMeans(DeepSpeed):
    """The loop of the documentation, around a model that returns its mean loss."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self.forward(self.engine, batch)["main"] / batch.tokens
        return self.engine.backward(loss)


@mutant(
    "deepspeed-divided-twice",
    strategy="deepspeed-zero2",
    case=TWO_BY_THREE,
    quantity="loss",
    source="huggingface/transformers#35808",
    mistake="the loss is divided by the window's tokens, and by gradient_accumulation_steps in engine.backward on top",
)
class DividedTwice(DeepSpeed):
    """scale_wrt_gas keeps its default."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        objective = self.objective(self.forward(self.engine, batch), k, batch)
        return self.engine.backward(objective)


@mutant(
    "deepspeed-short-window",
    strategy="deepspeed-zero0",
    case=SHORT_TAIL,
    quantity="gradient",
    source="deepspeedai/DeepSpeed#7439",
    mistake="the engine counts micro-batches itself, and never reaches the end of a short last window",
)
class ShortWindow(DeepSpeed):
    """engine.step() after every micro-batch, without telling it where a window ends."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        objective = self.objective(self.forward(self.engine, batch), k, batch)
        loss = self.engine.backward(objective, scale_wrt_gas=False)
        if not last:
            self.engine.step()
        return loss


@mutant(
    "deepspeed-default-clipping",
    strategy="deepspeed-zero2",
    case=LARGE,
    quantity="weight update",
    source="huggingface/accelerate#2791; deepspeedai/DeepSpeed#8068",
    mistake="gradient_clipping is left out of the configuration: gradients are clipped by a norm of 1",
)
class DefaultClipping(DeepSpeed):
    """Nobody asked for clipping."""

    def config(self) -> dict[str, Any]:
        return {key: value for key, value in super().config().items() if key != "gradient_clipping"}


@mutant(
    "deepspeed-clipped-outside",
    strategy="deepspeed-zero2",
    case=CLIPPED_SHARDS,
    quantity="weight update",
    source="EleutherAI/gpt-neox#1432; axolotl-ai-cloud/axolotl#1382",
    mistake="the limit does not reach the configuration, and torch's clipping finds no gradient on the parameters",
)
class ClippedOutside(DeepSpeed):
    """ZeRO keeps gradients elsewhere than in `.grad`."""

    def config(self) -> dict[str, Any]:
        return super().config() | {"gradient_clipping": 0.0}

    def clip(self, observe: Observe) -> None:
        torch.nn.utils.clip_grad_norm_(self.engine.parameters(), self.case.optimizer.clip or 0.0)


@mutant(
    "deepspeed-schedule-twice",
    strategy="deepspeed-zero2",
    case=MIDDLE,
    quantity="learning rate",
    source="Lightning-AI/pytorch-lightning#9771, #9788",
    mistake="the schedule that was handed to the engine is stepped by the training loop, too",
)
class ScheduleTwice(DeepSpeed):
    """engine.step() has moved it already."""

    def step_scheduler(self) -> None:
        self.scheduler.step()
