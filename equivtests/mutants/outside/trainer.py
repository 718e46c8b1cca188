"""Mutants of the Trainer adapter: what its users write, and what its loss then is divided by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments

from equivtests.adapters.trainer import Loop, MicroBatches, Trainer
from equivtests.adapters.trainer_models import LossModel
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import SHORT_TAIL, TWO_BY_THREE


@mutant(
    "trainer-local-tokens",
    strategy="trainer-ddp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="huggingface/transformers#34242, #39392",
    mistake="average_tokens_across_devices=False: each rank divides by its own tokens",
)
class LocalTokens(Trainer):
    """Ranks with few tokens count as much as full ones."""

    def arguments(self) -> TrainingArguments:
        arguments = super().arguments()
        arguments.average_tokens_across_devices = False
        return arguments


class Refuses(LossModel):
    """A model that says that it does not take the count."""

    accepts_loss_kwargs = False


class Drops(LossModel):
    """A model that takes the count and returns the mean over its own tokens all the same."""

    def forward(self, *inputs: Any, num_items_in_batch: Tensor | None = None, **more: Any) -> dict[str, Tensor]:
        return super().forward(*inputs, **more)


@mutant(
    "trainer-own-means",
    strategy="trainer-ddp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="huggingface/transformers#34191, #37766",
    mistake="the model does not take num_items_in_batch: means of micro-batches are averaged",
)
class OwnMeans(Trainer):
    """Trainer divides by the number of micro-batches, DDP by the number of ranks."""

    loss_model = Refuses


@mutant(
    "trainer-count-dropped",
    strategy="trainer-ddp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="huggingface/transformers#47688",
    mistake="the model takes num_items_in_batch and drops it: K means are added up and multiplied by W",
)
class DroppedCount(Trainer):
    """Trainer believes that the loss is divided by the window's tokens."""

    loss_model = Drops


class OwnLossLoop(Loop):
    """compute_loss is overridden, and what says how the loss is scaled is not."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


@mutant(
    "trainer-own-loss",
    strategy="trainer-ddp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="huggingface/transformers#43595; huggingface/trl#5710",
    mistake="an overridden compute_loss returns means of micro-batches, and nothing divides their sum by K",
)
class OwnLoss(Trainer):
    """Trainer still takes the loss for one that is scaled."""

    loop = OwnLossLoop


class Stream(IterableDataset):
    """The same micro-batches without a length."""

    def __init__(self, batches: MicroBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.batches)


class StreamLoop(Loop):
    """Fed from a stream."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(MicroBatches(self.adapter)), batch_size=None)


@mutant(
    "trainer-stream-tail",
    strategy="trainer-ddp",
    case=SHORT_TAIL,
    quantity="loss",
    source="huggingface/transformers#29561, #14309",
    mistake="a dataset without a length: the short last window is accumulated and never applied",
)
class StreamTail(Trainer):
    """Trainer knows only from the length which micro-batch is the last."""

    loop = StreamLoop

    def arguments(self) -> TrainingArguments:
        arguments = super().arguments()
        arguments.max_steps = self.case.updates
        return arguments
