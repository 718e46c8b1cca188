"""The Trainer of Hugging Face transformers. It owns its loop: the adapter hands it data and is its callback."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from equivtests.adapters.adapter import PLAIN_FEATURES, Claims, KnownDivergence, Strategy
from equivtests.adapters.torch_adapter import SHOWN, TorchAdapter
from equivtests.adapters.trainer_models import IGNORED, LossModel
from equivtests.cases.case import Semantics
from equivtests.cases.windows import Feed, MicroBatch
from equivtests.record.observation import Observe

RULES = {
    "trainer-ddp": None,
    "trainer-ddp-local-tokens": Semantics(denominator="rank"),
    "trainer-ddp-batch-means": Semantics(denominator="rank-microbatch"),
}
"""What Trainer documents: its default; average_tokens_across_devices=False; models that take no num_items_in_batch."""
NO_TOKEN = KnownDivergence(
    "*-empty-window-*", "weight update",
    "the optimizer steps, decays weights and moves its moments on a window in which every label is ignored",
    "https://github.com/huggingface/trl/issues/6668",
)  # fmt: skip


class MicroBatches(IterableDataset):
    """This rank's micro-batches. Its length tells Trainer which window is the last: that one alone may be short."""

    def __init__(self, adapter: Trainer) -> None:
        self.adapter = adapter

    def __len__(self) -> int:
        feed, rank = self.adapter.feed, self.adapter.ranks.rank
        return sum(len(window[rank]) for window in self.adapter.case.windows[feed.position : feed.stop])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for window in self.adapter.feed:
            self.adapter.window = window
            yield from map(self.adapter.inputs_of, window.microbatches)


class Loop(transformers.Trainer):
    """Trainer, with methods overridden that are there to be overridden. `adapter` is set by the adapter."""

    def get_train_dataloader(self) -> DataLoader:
        """What is split over ranks already is not prepared by accelerate, which would split it again."""
        return DataLoader(MicroBatches(self.adapter), batch_size=None)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's own rule leaves out biases and norms."""
        every = [name for name, _ in model.named_parameters()]
        return every if self.adapter.case.optimizer.decay_vectors else super().get_decay_parameter_names(model)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The place to see gradients that are reduced and not clipped yet: no callback lies between the two."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.adapter.on_micro_batch(loss, last=self.accelerator.sync_gradients)
        return loss

    def store_flos(self) -> None:
        """Nothing: gathering how many operations were made would be a collective that is no part of an update."""


class Trainer(TorchAdapter, transformers.TrainerCallback):
    """Trainer over DistributedDataParallel; on CPUs accelerate offers no FSDP."""

    loop, loss_model, loss = Loop, LossModel, 0.0

    def claims(self) -> Claims:
        shared: dict[str, Any] = {
            "features": PLAIN_FEATURES | {"conditional", "dropout", "extra_head", "unused"},  # z_loss: no count of rows
            "precisions": frozenset({"float32", "float64", "float32/bfloat16/float32"}),
            "clips": frozenset({"2"}),
            "ragged": False,  # gradient_accumulation_steps is one number for all ranks
            "observes": SHOWN - {"tokens"},  # the count that a model gets is no integer
            "algorithm": "all-reduce",
        }
        strategies = tuple(Strategy(name, semantics=rule, known=(NO_TOKEN,), **shared) for name, rule in RULES.items())
        name, mutants = f"transformers {transformers.__version__}", ("equivtests.mutants.outside.trainer",)
        return Claims(strategies, framework=name, preload=("transformers.trainer",), mutants=mutants)

    def wrap(self, module: nn.Module) -> nn.Module:
        model = self.loss_model(module, self.case.magnitude)
        model.accepts_loss_kwargs &= self.strategy != "trainer-ddp-batch-means"
        adam = (torch.optim.Adam, self.optimizer_options()) if self.case.optimizer.name == "adam" else None
        self.trainer = self.loop(model, self.arguments(), callbacks=[self], optimizer_cls_and_kwargs=adam)
        self.trainer.adapter = self
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.create_optimizer()

    def arguments(self) -> transformers.TrainingArguments:
        o = self.case.optimizer
        return transformers.TrainingArguments(
            gradient_accumulation_steps=self.case.accumulation, max_grad_norm=o.clip or 0.0, num_train_epochs=1,
            average_tokens_across_devices=self.strategy != "trainer-ddp-local-tokens",
            optim="adamw_torch" if o.name == "adamw" else "sgd", optim_args=f"momentum={o.momentum}",
            learning_rate=o.lr, adam_beta1=o.betas[0], adam_beta2=o.betas[1], adam_epsilon=o.eps,
            weight_decay=o.weight_decay, bf16=self.case.precision.compute == "bfloat16",
            logging_strategy="steps" if o.clip else "no", logging_steps=1,  # the norm is in the log alone
            use_cpu=self.ranks.device == "cpu", output_dir=tempfile.gettempdir(), save_strategy="no",
            report_to="none", disable_tqdm=True, log_level="error",
        )  # fmt: skip

    def inputs_of(self, batch: MicroBatch) -> dict[str, Any]:
        """What the model is fed; labels say which positions count."""
        arrays = {"inputs": batch.inputs, "targets": batch.targets, "ids": batch.ids}
        arrays["labels"] = np.where(batch.valid, 0, IGNORED)
        return {name: self.to_device(array) for name, array in arrays.items()} | {"conditional": batch.conditional}

    def run(self, feed: Feed, observe: Observe) -> None:
        self.observe, self.trainer.lr_scheduler = observe, self.scheduler
        self.trainer.train()

    def on_train_begin(self, *_: Any, **objects: Any) -> None:
        self.show_state(self.observe, self.feed.position)

    def on_micro_batch(self, loss: Tensor, last: bool) -> None:
        """Loss and gradients of a micro-batch are there; with the last one they are those of the window."""
        self.loss += loss.item()
        if last:
            self.show_bytes(self.observe, "weights", [p for _, p, _ in self.shown()])
            self.show_bytes(self.observe, "gradients", self.accumulated())
            self.show_update(self.observe, torch.tensor(self.loss, dtype=torch.float64))
            self.show_rate(self.observe)
            self.loss = 0.0

    def on_step_end(self, *_: Any, **objects: Any) -> None:
        self.steps, self.stream.draw = self.steps + 1, self.stream.draw + 1
        self.show_bytes(self.observe, "state", [t for _, t, _ in self.optimizer_state() if t.ndim > 0])
        self.show_state(self.observe, self.window.update + 1)

    def on_log(self, *_: Any, logs: dict[str, float], **objects: Any) -> None:
        if "grad_norm" in logs:  # not in the summary at the end
            norm = torch.tensor(logs["grad_norm"], dtype=self.dtype)
            self.show_clipping(self.observe, self.trainer.args.max_grad_norm, norm)

    def on_train_end(self, *_: Any, **objects: Any) -> None:
        """Nothing is left here, unless Trainer dropped a window."""
        self.show_inputs(self.observe)
