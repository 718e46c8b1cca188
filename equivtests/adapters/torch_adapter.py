"""A torch training loop in small overridable steps: the base of the textbook and native adapters, and of yours.

A strategy overrides `wrap` (put the framework around the module), `synchronize` (what makes gradients global) and, if
it shards, `shown` (where each local tensor belongs). Everything else is one plain training loop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equivtests.adapters.adapter import Adapter
from equivtests.adapters.context import Ranks
from equivtests.adapters.places import show
from equivtests.cases.case import Case
from equivtests.cases.parameters import decays
from equivtests.cases.windows import Feed, MicroBatch, Window, empty_micro_batch
from equivtests.models.build import TERM_DENOMINATOR, TERM_WEIGHTS, build
from equivtests.models.parts import Terms
from equivtests.record.observation import Observe, Place

SHOWN = frozenset(
    {"inputs", "tokens", "loss", "gradient", "norm", "clip", "lr", "weight", "state"}
    | {"step", "random_state", "cursor", "bytes"}
)
"""The kinds that every adapter derived from `TorchAdapter` shows: use it as `Strategy(observes=SHOWN)`."""

CLIP_EPS = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does

Shown = tuple[str, Tensor, Place | None]
"""Canonical name, local tensor (a parameter), and its place (None: a DTensor, or the whole tensor on every rank)."""


class Counts:
    """Valid tokens and rows of a window over all ranks, per micro-batch number: int64 arrays of shape (K,)."""

    def __init__(self, table: np.ndarray) -> None:
        present = table[table[:, 2] > 0]
        self.tokens, self.rows = present[:, 0], present[:, 1]

    @property
    def microbatches(self) -> int:
        return len(self.tokens)


class TorchAdapter(Adapter):
    """One update: count, feed forward and backward, synchronize, unscale, clip, step, show."""

    own_models = True

    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer

    # ------------------------------------------------------------------ building

    def setup(self, case: Case, ranks: Ranks) -> None:
        self.case, self.ranks = case, ranks
        self.dtype = getattr(torch, case.precision.weights)
        self.module, self.stream = build(case, ranks.device)
        self.watch_inputs(self.module)
        self.model = self.wrap(self.module)
        self.optimizer = self.make_optimizer()
        self.scheduler = self.make_scheduler(self.optimizer)
        self.steps = 0
        scaling = case.precision.loss_scale
        self.loss_scale, self.growth = (scaling.initial if scaling else 1.0), 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The framework's model around the plain module (which holds canonical weights on every rank)."""
        return module

    def watch_inputs(self, module: nn.Module) -> None:
        """Keep what reaches the module's forward pass, so that sample ids are decoded from it."""
        self.fed: list[Tensor] = []
        module.register_forward_pre_hook(lambda _, arguments: self.fed.append(arguments[0].detach().cpu()))

    def trainable(self) -> list[tuple[str, Tensor]]:
        """(canonical name, tensor) of everything the optimizer updates on this rank."""
        return [(name, p) for name, p, _ in self.shown() if p.requires_grad]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer of the case, with a group that decays and one that does not."""
        return self.optimizer_class()(self.parameter_groups(), **self.optimizer_options())

    def parameter_groups(self) -> list[dict[str, Any]]:
        wd = self.case.optimizer.weight_decay
        split: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, tensor in self.trainable():
            split[self.decays(name, tensor)].append(tensor)
        groups = [{"params": split[yes], "weight_decay": wd if yes else 0.0} for yes in (True, False) if split[yes]]
        return groups or [{"params": []}]  # a rank whose shard is empty

    def decays(self, name: str, tensor: Tensor) -> bool:
        """Whether weight decay applies, by the canonical shape (a shard's own shape would mislead)."""
        return decays(self.case, name)

    def optimizer_class(self) -> Any:
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(self.case.optimizer.name, torch.optim.SGD)

    def optimizer_options(self) -> dict[str, Any]:
        o = self.case.optimizer
        if o.name in ("adam", "adamw"):
            return {"lr": o.lr, "betas": o.betas, "eps": o.eps}
        return {"lr": o.lr, "momentum": o.momentum}

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The case's schedule of the learning rate; `step_scheduler` moves it."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate_factor)

    def rate_factor(self, step: int) -> float:
        schedule = self.case.optimizer.schedule
        return schedule[min(step, len(schedule) - 1)]

    # ------------------------------------------------------------------ one update

    def run(self, feed: Feed, observe: Observe) -> None:
        self.show_state(observe, feed.position)
        super().run(feed, observe)

    def update(self, window: Window, observe: Observe) -> None:
        self.window, self.counts = window, self.count(window)
        observe("tokens", "tokens", np.int64(self.counts.tokens.sum()), update=window.update)
        if self.counts.tokens.sum() > 0:
            loss = self.accumulate(self.balanced(window))
            self.show_bytes(observe, "weights", [p for _, p, _ in self.shown()])
            self.show_bytes(observe, "gradients", self.accumulated())
            self.finish_gradients()
            self.show_update(observe, loss)
            self.clip(observe)
            self.advance(observe)
        self.after_window(window.update)
        self.show_state(observe, window.update + 1)
        self.optimizer.zero_grad()

    def after_window(self, update: int) -> None:
        """Called after every window, whether or not a step was made in it, before what leaves it is shown."""

    def count(self, window: Window) -> Counts:
        """Tokens and rows of every micro-batch number, added up over all ranks."""
        table = self.own_counts(window).to(self.ranks.device)
        dist.all_reduce(table, group=self.data_group())
        return Counts(table.cpu().numpy())

    def data_group(self) -> Any:
        """The process group of the ranks that are fed different parts of a window (None: all ranks)."""
        return None

    def averaged(self) -> int:
        """W: over how many ranks gradients and losses are averaged."""
        return self.ranks.world

    def own_counts(self, window: Window) -> Tensor:
        """This rank's tokens, rows and presence of every micro-batch number; int64 (K, 3)."""
        table = torch.zeros(self.case.accumulation, 3, dtype=torch.int64)
        for k, batch in enumerate(window.microbatches):
            table[k] = torch.tensor([batch.tokens, batch.rows, 1])
        return table

    def balanced(self, window: Window) -> list[MicroBatch]:
        """This rank's micro-batches, filled up with empty ones: every rank takes part in every collective."""
        missing = self.counts.microbatches - len(window.microbatches)
        return list(window.microbatches) + [empty_micro_batch(self.case)] * missing

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        """Forward and backward of all micro-batches; returns a loss whose mean over ranks is the window's."""
        loss = torch.zeros((), dtype=torch.float64)
        for k, batch in enumerate(batches):
            loss += self.forward_backward(k, batch, last=k == len(batches) - 1).detach().double().cpu()
            self.after_backward(k)
        return loss

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        objective = self.objective(self.forward(self.model, batch), k, batch)
        self.backward(objective)
        return objective

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        """Loss terms of one micro-batch, as sums."""
        move = self.to_device
        return model(move(batch.inputs), move(batch.targets), move(batch.valid), move(batch.ids), batch.conditional)

    def to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array).to(self.ranks.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def objective(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        """What this rank differentiates for one micro-batch: the mean over ranks, added up, is the window's loss."""
        parts = [TERM_WEIGHTS[name] * self.factor(name, k, batch) * value for name, value in terms.items()]
        return self.case.magnitude * torch.stack(parts).sum()

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        """Factor on a summed loss term, W / (window total) unless the case asks for another span."""
        if TERM_DENOMINATOR[term] == "rows":
            return self.averaged() / int(self.counts.rows.sum())
        return self.token_factor(self.case.semantics.denominator, k, batch)

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        world, tokens = self.averaged(), self.counts.tokens
        if span == "window":
            return world / int(tokens.sum())
        if span == "microbatch":
            return world / (len(tokens) * int(tokens[k])) if tokens[k] else 0.0
        if span == "rank":
            own = sum(b.tokens for b in self.window.microbatches)
            return 1 / own if own else 0.0
        if span == "rank-microbatch":
            return 1 / (len(self.window.microbatches) * batch.tokens) if batch.tokens else 0.0
        return world * batch.rows / (int(self.counts.rows.sum()) * batch.tokens) if batch.tokens else 0.0

    def backward(self, objective: Tensor) -> None:
        (objective * self.loss_scale).backward()

    def after_backward(self, k: int) -> None:
        """Called after the backward pass of micro-batch `k`."""

    def finish_gradients(self) -> None:
        """Gradients global, then free of the loss scale."""
        self.synchronize()
        self.unscale()

    def synchronize(self) -> None:
        """Make this rank's gradients those of the whole window."""

    def unscale(self) -> None:
        if self.loss_scale != 1.0:
            for _, gradient, _ in self.gradients():
                gradient.div_(self.loss_scale)

    def clip(self, observe: Observe) -> None:
        """Clip by the norm of the whole model's gradient, if the case asks for it."""
        limit = self.case.optimizer.clip
        if limit is None:
            return
        order = math.inf if self.case.optimizer.clip_norm == "inf" else 2.0
        self.show_clipping(observe, limit, self.clip_gradients(limit, order).detach())

    def show_clipping(self, observe: Observe, limit: float, norm: Tensor) -> None:
        """Show the norm before clipping, and the factor that follows from it."""
        here = Place((), replica=self.ranks.rank)
        for kind, value in (("norm", norm), ("clip", self.clip_factor(limit, norm))):
            observe(kind, kind, value.double().cpu().numpy(), update=self.window.update, place=here)

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        """Scale the gradients in place so that their norm does not exceed `limit`; returns the norm before."""
        norm = self.gradient_norm(order)
        for _, gradient, _ in self.gradients():
            gradient.mul_(self.clip_factor(limit, norm).to(gradient.dtype))
        return norm

    def clip_factor(self, limit: float, norm: Tensor) -> Tensor:
        """What gradients are multiplied with: never more than 1."""
        return coefficient(limit, norm)

    def gradient_norm(self, order: float) -> Tensor:
        """Norm of the whole model's gradient, each element counted once; a scalar tensor."""
        return torch.nn.utils.get_total_norm([g for _, g, _ in self.gradients()], order)

    def advance(self, observe: Observe) -> None:
        """The optimizer's step and all that moves with it."""
        self.show_rate(observe)
        self.step_everything()
        self.show_bytes(observe, "state", [t for _, t, _ in self.optimizer_state() if t.ndim > 0])

    def step_everything(self) -> None:
        """Optimizer, schedule, random state, step counter and loss scale, together."""
        self.optimizer_step()
        self.step_scheduler()
        self.stream.draw += 1
        self.steps += 1
        self.grow_loss_scale()

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def step_scheduler(self) -> None:
        self.scheduler.step()

    def grow_loss_scale(self) -> None:
        scaling = self.case.precision.loss_scale
        if scaling is not None:
            self.growth += 1
            if self.growth == scaling.growth_interval:
                self.loss_scale, self.growth = self.loss_scale * 2, 0

    # ------------------------------------------------------------------ showing

    def shown(self) -> Iterator[Shown]:
        """Every parameter this rank holds (part of). Override where parameters are sharded."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter, Place(tuple(parameter.shape), replica=self.ranks.rank)

    def gradients(self) -> Iterator[Shown]:
        """The gradients this rank holds; a gradient that is absent is not shown."""
        for name, parameter, place in self.shown():
            if parameter.grad is not None:
                yield name, parameter.grad, place

    def show_inputs(self, observe: Observe) -> None:
        """What reached forward passes since the last update."""
        for k, inputs in enumerate(self.fed):
            if len(inputs):
                show(observe, "inputs", "inputs", inputs, update=self.window.update, microbatch=k)
        self.fed.clear()

    def show_update(self, observe: Observe, loss: Tensor) -> None:
        update = self.window.update
        self.show_inputs(observe)
        self.show_loss(observe, loss)
        for name, gradient, place in self.gradients():
            show(observe, "gradient", name, gradient, update=update, place=place)

    def show_loss(self, observe: Observe, loss: Tensor) -> None:
        observe("loss", "loss", loss.numpy(), update=self.window.update, place=self.loss_place())

    def loss_place(self) -> Place:
        """The mean over the ranks is the window's loss."""
        return Place((), partial="mean")

    def show_rate(self, observe: Observe) -> None:
        """The learning rate that the optimizer is about to use."""
        rate = np.float64(self.optimizer.param_groups[0]["lr"])
        observe("lr", "lr", rate, update=self.window.update, place=Place((), replica=self.ranks.rank))

    def show_bytes(self, observe: Observe, name: str, tensors: list[Tensor]) -> None:
        """Bytes of what this rank keeps, shown where it is most: gradients before they are reduced to any shards."""
        observe("bytes", name, np.int64(stored_bytes(tensors)), update=self.window.update)

    def accumulated(self) -> list[Tensor]:
        """The gradients that this rank keeps from one micro-batch to the next."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def show_state(self, observe: Observe, update: int) -> None:
        """All state that enters `update`: weights, optimizer, buffers and counters."""
        for name, parameter, place in self.shown():
            show(observe, "weight", name, parameter, update=update, place=place)
        for name, tensor, place in self.optimizer_state():
            show(observe, "state", name, tensor, update=update, place=place)
        for name, buffer in self.buffers():
            show(observe, "buffer", name, buffer, update=update, replica=self.ranks.rank)
        here = Place((), replica=self.ranks.rank)
        for kind, value in self.counters().items():
            observe(kind, kind, np.int64(value), update=update, place=here)
        observe("loss_scale", "loss_scale", np.float64(self.loss_scale), update=update, place=here)

    def counters(self) -> dict[str, int]:
        """Kind and value of what counts updates, windows and draws."""
        return {"step": self.steps, "cursor": self.feed.position, "random_state": self.stream.draw}

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, tensor) of the model's buffers, which every rank holds whole."""
        yield from self.module.named_buffers()

    def optimizer_state(self) -> Iterator[Shown]:
        """(parameter/key, tensor, place) of the optimizer's state; scalars are whole on every rank."""
        for name, parameter, place in self.shown():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    whole = Place((), replica=self.ranks.rank) if value.ndim == 0 else place
                    yield f"{name}/{key}", value, whole

    # ------------------------------------------------------------------ checkpoints

    def trainer_state(self) -> dict[str, Any]:
        """Everything but weights and optimizer that the next update depends on; plain JSON data."""
        return {
            "step": self.steps,
            "cursor": self.feed.position,
            "random_state": self.stream.draw,
            "loss_scale": [self.loss_scale, self.growth],
            "schedule": self.scheduler.last_epoch,
            "layout": [self.ranks.world, self.case.layout.replicate],
        }

    def save(self, directory: Path) -> None:
        self.save_tensors(directory)
        if self.ranks.rank == 0:
            (directory / "trainer.json").write_text(json.dumps(self.trainer_state()))
        dist.barrier()

    def load(self, directory: Path) -> None:
        self.load_tensors(directory)
        self.load_trainer_state(json.loads((directory / "trainer.json").read_text()))

    def load_trainer_state(self, saved: dict[str, Any]) -> None:
        if saved["layout"] != [self.ranks.world, self.case.layout.replicate]:
            raise ValueError(f"the checkpoint has layout {saved['layout']}, this run {self.case.layout}")
        self.steps = saved["step"]
        self.feed.seek(saved["cursor"])
        self.stream.draw = saved["random_state"]
        self.loss_scale, self.growth = saved["loss_scale"]
        self.load_schedule(saved["schedule"])

    def load_schedule(self, step: int) -> None:
        """Put the learning rate where it stood after `step` updates."""
        self.scheduler.last_epoch = step
        for group, base in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * self.rate_factor(step)

    def save_tensors(self, directory: Path) -> None:
        """Write weights, buffers and optimizer state."""
        raise TypeError(f"{type(self).__name__}.save_tensors() is not written, yet the strategy claims restores=True")

    def load_tensors(self, directory: Path) -> None:
        """Read what `save_tensors` wrote."""
        raise TypeError(f"{type(self).__name__}.load_tensors() is not written, yet the strategy claims restores=True")


def coefficient(limit: float, norm: Tensor) -> Tensor:
    """min(1, limit / (norm + 1e-6)), a scalar tensor."""
    return (limit / (norm + CLIP_EPS)).clamp(max=1.0)


def stored_bytes(tensors: list[Any]) -> int:
    """Bytes of the storages behind local tensors, each storage counted once."""
    local = [t.to_local() if type(t).__name__ == "DTensor" else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}
    return sum(storages.values())
