"""Mutants of DeepSpeed's pipelines: loss functions and layers that do not fit what the engine does with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equivtests.adapters.deepspeed_pipeline import DeepSpeedPipeline
from equivtests.mutants.mutant import mutant
from equivtests.mutants.split_situations import STAGED, STAGED_TIED


@mutant(
    "deepspeed-pipeline-share",
    strategy="deepspeed-pipeline",
    case=STAGED,
    quantity="loss",
    source="deepspeedai/DeepSpeed#7773",
    mistake="the loss function gives a share of the window's loss, as if the engine added micro-batches up",
)
class Share(DeepSpeedPipeline):
    """The engine divides by the number of micro-batches once more."""

    def loss_of(self, x: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
        return super().loss_of(x, labels) / len(self.batches)


@mutant(
    "deepspeed-pipeline-mean-of-means",
    strategy="deepspeed-pipeline",
    case=STAGED,
    quantity="loss",
    source="huggingface/transformers#34191",
    mistake="the loss function is the mean over the valid tokens of the micro-batch that it is given",
)
class MeanOfMeans(DeepSpeedPipeline):
    """What the documentation's example, nn.CrossEntropyLoss, does."""

    def loss_of(self, x: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
        targets, valid, _ = labels
        return self.whole.end(x, targets, valid, False)["main"] / valid.sum().clamp(min=1)


@mutant(
    "deepspeed-pipeline-untied",
    strategy="deepspeed-pipeline",
    case=STAGED_TIED,
    quantity="gradient",
    source="https://deepspeed.readthedocs.io/en/stable/pipeline.html",
    mistake="embedding and head start as copies on two stages, without TiedLayerSpec: their gradients are not added up",
)
class Untied(DeepSpeedPipeline):
    """Tied on one device only."""

    def wrap(self, module: nn.Module) -> nn.Module:
        wrapped: Any = super().wrap(module)
        wrapped.tied_comms = {}
        return wrapped
