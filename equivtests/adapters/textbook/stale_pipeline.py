"""Pipelines that are never flushed: every stage updates its weights as soon as it can, and keeps old versions of them.

Weight stashing and vertical sync: Harlap et al. 2018, PipeDream, arXiv 1806.03377, section 3.3; Narayanan et al., PipeDream,
SOSP 2019, section 3.3. Two buffers: Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training (PipeDream-2BW),
section 3.1. Prediction: Chen, Yang and Cheng 2018, Efficient and robust parallel DNN training through model parallelism on
multi-GPU platform (SpecTrain), section 3.3. All run 1F1B order over the whole run.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.adapters.textbook.mesh import SPLIT_FEATURES
from equivtests.adapters.textbook.pipeline import Pass, PipelineParallel, Turn, pipeline_strategy
from equivtests.adapters.torch_adapter import SHOWN, Counts
from equivtests.cases.case import Case, Semantics
from equivtests.cases.staleness import Scheme, Staleness
from equivtests.cases.windows import Feed, MicroBatch, Window
from equivtests.record.observation import Observe, Place
from equivtests.reference.timeline import KIND_CODES, Operation

ASYNCHRONOUS = (SHOWN - {"cursor", "random_state", "bytes"}) | {"mask", "output", "timeline", "live"}
"""What is shown: ranks run ahead of each other, and draw dropout by the number of the window."""


def stale_strategy(name: str, scheme: Scheme, **changes: Any) -> Strategy:
    """A strategy of pipelines that are never flushed, with what all of them share."""
    shared: dict[str, Any] = {
        "semantics": Semantics(staleness=Staleness(versions=scheme)),
        "asynchronous": "pipeline",
        "microbatches": "one",
        "updates": 3,
        "observes": ASYNCHRONOUS,
        "algorithm": None,
    }
    return pipeline_strategy(name, {"dp", "pp"}, "1f1b", **(shared | changes))


ALONE: dict[str, Any] = {"features": SPLIT_FEATURES - {"tied"}, "clips": frozenset[str]()}
"""What stages that use different versions do not support: what needs the gradients of several stages at once."""


@dataclass(frozen=True)
class Version:
    """A version of a stage's weights. number: updates made before it.

    leaves: by name in the module, parameters of its own, which no update touches: passes that use the version refer to them.
    """

    number: int
    leaves: Mapping[str, nn.Parameter]


@dataclass
class Underway:
    """A window between its first forward pass on a stage and its update there.

    first: number of its first micro-batch through the run. before: updates that earlier windows make, the number of the
    window among those that make one. used: by micro-batch whose backward pass is still to come, the version of its forward
    pass. entered: micro-batches that forward passes have begun on. gradients: by name in the module, accumulated so far.
    """

    window: Window
    counts: Counts
    batches: list[MicroBatch]
    first: int
    before: int
    used: dict[int, Version] = field(default_factory=dict)
    entered: int = 0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    passed: dict[Turn, Pass] = field(default_factory=dict)
    begun: dict[int, Tensor] = field(default_factory=dict)
    kept: list[tuple[str, int, Tensor]] = field(default_factory=list)


class WeightStashing(PipelineParallel):
    """Strategy pipedream: forward passes use the newest weights of the stage, backward passes those of the forward pass.

    The optimizer's parameters are those of the module. Passes use copies of them, one set for each version in `stash`.
    """

    def claims(self) -> Claims:
        return Claims((stale_strategy("pipedream", "stashing", **ALONE),), framework="equivtests textbook")

    @property
    def drains(self) -> bool:
        """Whether everything in flight is finished when the feed ends in the middle of a case."""
        return next(s.drains for s in self.claims().strategies if s.name == self.strategy)

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.stage, self.warmup = self.pipe.index, self.layout.pp - 1 - self.pipe.index
        self.newest = dict(self.module.named_parameters())
        self.make_groups()
        self.stash: dict[int, Version] = {}
        self.underway: dict[int, Underway] = {}
        self.arrived: dict[int, Tensor] = {}
        self.handed, self.sending, self.ran = {}, [], []
        self.following = self.opened = self.numbered = self.left = self.drained = 0
        self.recomputing = False
        self.keep_newest()

    def make_groups(self) -> None:
        """All groups that are used later, which ranks can make only together."""
        self.data_group()
        self.line("dp", "cp"), self.line("edp")

    # ------------------------------------------------------------------ versions

    def version_for_forward(self, k: int) -> int:
        """The newest of this stage."""
        return self.steps

    def version_for_backward(self, k: int) -> int:
        """That of the forward pass."""
        return self.work.used[k].number

    def weights_for(self, k: int) -> Version:
        """What the forward pass of micro-batch `k` of the window is run with."""
        return self.stash[self.version_for_forward(k)]

    def keep_newest(self) -> None:
        """Keep the weights that the optimizer has made as a version of their own."""
        leaves = {n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in self.newest.items()}
        self.stash[self.steps] = Version(self.steps, leaves)
        self.live = len(self.versions_kept())

    def forget(self) -> None:
        """Drop the versions that nothing in flight or still to come needs."""
        needed = self.needed()
        self.stash = {number: version for number, version in self.stash.items() if number in needed}

    def needed(self) -> set[int]:
        """Versions that are needed beside the one that was just made."""
        return {version.number for version in self.in_flight()}

    def in_flight(self) -> list[Version]:
        """What the forward passes used whose backward passes are still to come."""
        return [version for work in self.underway.values() for version in work.used.values()]

    def versions_kept(self) -> set[int]:
        return {*self.stash, *(version.number for version in self.in_flight())}

    @contextmanager
    def holding(self, leaves: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """The module with these parameters."""
        self.put(leaves)
        yield
        self.put(self.newest)

    def put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, parameter)

    @contextmanager
    def reading(self, used: Version, number: int) -> Iterator[None]:
        """A backward pass that reads the weights of another version than the forward pass used: what autograd has kept of
        the forward pass are activations and references to the weights."""
        if number == used.number:
            yield
            return
        own = {name: leaf.detach().clone() for name, leaf in used.leaves.items()}
        overwrite(used, self.stash[number].leaves)
        yield
        overwrite(used, own)

    # ------------------------------------------------------------------ the order

    def run(self, feed: Feed, observe: Observe) -> None:
        self.observe = observe
        self.show_state(observe, feed.position)
        for window in feed:
            self.pass_through(window)
            self.after_passes(window.update)
        self.come_to_rest()

    def pass_through(self, window: Window) -> None:
        """Until the last backward pass of a window: before each one, forward passes up to what 1F1B keeps in flight."""
        work = self.open(window)
        for k in range(len(work.batches)):
            self.fill()
            self.turn_to(work)
            self.perform(Operation("B", self.stage, k))
            self.left += 1

    def fill(self) -> None:
        """Forward passes of what comes next, until P - s micro-batches are in flight on stage s."""
        while len(self.in_flight()) <= self.warmup and (work := self.entering()) is not None:
            self.before_forward(work)
            self.turn_to(work)
            self.perform(Operation("F", self.stage, work.entered))

    def entering(self) -> Underway | None:
        """The window of the micro-batch that comes next, None after the last one."""
        for work in self.underway.values():
            if work.entered < len(work.batches):
                return work
        following = self.feed.ahead(self.following) if self.following < self.begins_before else None
        if following is None:
            return None
        work = self.open(following)
        return work if work.batches else self.entering()

    @property
    def begins_before(self) -> int:
        """The first window that is not begun."""
        return self.feed.stop if self.drains else self.case.updates

    def open(self, window: Window) -> Underway:
        """Number the micro-batches of a window when the first of them comes; without a valid token none of them passes."""
        if window.update not in self.underway:
            self.counts = self.count(window)
            some = self.counts.tokens.sum() > 0
            batches = self.balanced(window) if some else []
            self.underway[window.update] = Underway(window, self.counts, batches, self.numbered, self.opened)
            self.numbered, self.opened = self.numbered + len(batches), self.opened + int(some)
            self.following = window.update + 1
        return self.underway[window.update]

    def turn_to(self, work: Underway) -> None:
        """Let the steps of a window work on this one."""
        self.work, self.window, self.counts, self.batches = work, work.window, work.counts, work.batches
        self.loss, self.passed, self.begun, self.kept = work.loss, work.passed, work.begun, work.kept

    def before_forward(self, work: Underway) -> None:
        """Called before a forward pass of a window."""

    def come_to_rest(self) -> None:
        """The feed has ended: where nothing is in flight, staleness begins anew."""
        if not self.in_flight():
            self.drained = self.steps
            self.forget()
            self.keep_newest()
            self.finish_sending()

    # ------------------------------------------------------------------ passes

    def forward_stage(self, stage: int, k: int) -> None:
        self.forward_with(self.weights_for(k), stage, k)

    def forward_with(self, version: Version, stage: int, k: int) -> None:
        """A forward pass. Dropout is drawn as on one device: by the updates that have been made before the window there."""
        self.work.used[k], self.stream.draw = version, self.work.before
        self.work.entered += 1
        with self.holding(version.leaves):
            super().forward_stage(stage, k)

    def backward_stage(self, stage: int, k: int) -> None:
        with self.reading(self.work.used[k], self.version_for_backward(k)):
            super().backward_stage(stage, k)

    def perform(self, operation: Operation) -> None:
        super().perform(operation)
        self.live = max(self.live, len(self.versions_kept()))
        if operation.kind == "B":
            self.accumulate_from(self.work.used.pop(operation.microbatch))

    def accumulate_from(self, version: Version) -> None:
        """Move gradients from the leaves of a version to the window that they are of."""
        for name, leaf in version.leaves.items():
            if leaf.grad is not None:
                earlier = self.work.gradients.get(name)
                self.work.gradients[name] = leaf.grad if earlier is None else earlier + leaf.grad
                leaf.grad = None

    def noted(self, operation: Operation) -> tuple[int, int, int, int]:
        """Micro-batches are numbered through the run; the version is that of the weights which were used."""
        k = operation.microbatch
        version = self.work.used[k].number if operation.kind == "F" else self.version_for_backward(k)
        return KIND_CODES[operation.kind], operation.stage, self.work.first + k, version

    def tag(self, stage: int, k: int, forward: bool) -> int:
        return super().tag(stage, self.work.first + k, forward)

    def send_forward(self, stage: int, k: int, x: Tensor) -> None:
        if not self.recomputing:
            super().send_forward(stage, k, x)

    def recv_forward(self, stage: int, k: int) -> Tensor:
        early = self.arrived.pop(self.work.first + k, None)
        return super().recv_forward(stage, k) if early is None else early.requires_grad_()

    def finish_sending(self) -> None:
        super().finish_sending()
        self.sending = []

    # ------------------------------------------------------------------ updates

    def after_passes(self, update: int) -> None:
        """The last backward pass of a window has run: make its update at once."""
        self.make_update(update)

    def make_update(self, update: int) -> None:
        """Apply the gradient of a window to the newest weights, and keep the result as a version."""
        self.turn_to(self.underway.pop(update))
        self.observe("tokens", "tokens", np.int64(self.counts.tokens.sum()), update=update)
        if self.batches:
            self.hand_over()
            self.finish_gradients()
            self.show_update(self.observe, self.loss)
            self.clip(self.observe)
            self.advance(self.observe)
            self.optimizer.zero_grad()
            self.forget()
            self.keep_newest()
        self.show_state(self.observe, update + 1)

    def hand_over(self) -> None:
        """Give the accumulated gradients to the optimizer's parameters."""
        for name, gradient in self.work.gradients.items():
            self.newest[name].grad = gradient

    def globally_used(self) -> list[tuple[str, Tensor]]:
        """Every forward pass of a stage uses all of its parameters, so that no rank has to ask others."""
        return self.trainable()

    # ------------------------------------------------------------------ showing

    def show_update(self, observe: Observe, loss: Tensor) -> None:
        super().show_update(observe, loss)
        self.ran = []
        observe(
            "live", "live", np.int64(self.live), update=self.window.update, place=Place((), replica=self.ranks.rank)
        )

    def counters(self) -> dict[str, int]:
        return {"step": self.steps}

    def show_bytes(self, observe: Observe, name: str, tensors: list[Tensor]) -> None:
        """Not shown: what is kept is said by `live`."""

    # ------------------------------------------------------------------ checkpoints

    def save(self, directory: Path) -> None:
        """What is on its way to this rank is taken in before, and all that this rank has sent has been taken in."""
        self.take_in()
        self.finish_sending()
        super().save(directory)

    def take_in(self) -> None:
        """The stage before has made one forward pass more: take in what it gave."""
        if self.in_flight_elsewhere() and (work := self.entering()) is not None:
            self.turn_to(work)
            number = work.first + work.entered
            self.arrived[number] = self.receive(self.stage - 1, self.stage, work.entered, forward=True)

    def in_flight_elsewhere(self) -> bool:
        """Whether an activation can be on its way to this rank."""
        return self.stage > 0 and not self.drains

    def save_tensors(self, directory: Path) -> None:
        super().save_tensors(directory)
        held = {**self.stashed_tensors(), **self.entered_tensors()}
        held |= {f"arrived/{number}": x.detach().contiguous() for number, x in self.arrived.items()}
        save_file(held, directory / f"rank-{self.ranks.rank}-pipeline.safetensors")
        (directory / f"rank-{self.ranks.rank}-pipeline.json").write_text(json.dumps(self.passes_in_flight()))

    def stashed_tensors(self) -> dict[str, Tensor]:
        """version/name of all versions."""
        leaves = ((v, name, leaf) for v, version in self.stash.items() for name, leaf in version.leaves.items())
        return {f"stash/{v}/{name}": leaf.detach().contiguous() for v, name, leaf in leaves}

    def entered_tensors(self) -> dict[str, Tensor]:
        """What entered this stage for the micro-batches in flight."""
        passes = ((work.first + k, p.entered) for work in self.underway.values() for (_, k), p in work.passed.items())
        return {f"entered/{number}": x.detach().contiguous() for number, x in passes if x is not None}

    def passes_in_flight(self) -> list[tuple[int, int, int]]:
        """(window, micro-batch, version) of the forward passes whose backward passes are still to come, in their order."""
        works = self.underway.items()
        return [(update, k, version.number) for update, work in works for k, version in work.used.items()]

    def trainer_state(self) -> dict[str, Any]:
        return super().trainer_state() | {"microbatches": self.left}

    def load_trainer_state(self, saved: dict[str, Any]) -> None:
        super().load_trainer_state(saved)
        self.left = self.numbered = saved["microbatches"]
        self.following = saved["cursor"]
        self.opened = self.drained = self.steps

    def load(self, directory: Path) -> None:
        super().load(directory)
        held = load_file(directory / f"rank-{self.ranks.rank}-pipeline.safetensors")
        self.stash = self.load_stash(held)
        self.live = len(self.stash)
        passes = json.loads((directory / f"rank-{self.ranks.rank}-pipeline.json").read_text())
        self.rebuild(passes, self.numbered_tensors(held, "entered"))
        self.arrived |= self.numbered_tensors(held, "arrived")

    def load_stash(self, held: dict[str, Tensor]) -> dict[int, Version]:
        """The versions of a checkpoint, by number."""
        found: dict[int, dict[str, nn.Parameter]] = {}
        for key, tensor in held.items():
            kind, number, name = (*key.split("/", 2), "")[:3]
            if kind == "stash":
                found.setdefault(int(number), {})[name] = nn.Parameter(tensor, self.newest[name].requires_grad)
        return {number: Version(number, leaves) for number, leaves in sorted(found.items())}

    def numbered_tensors(self, held: dict[str, Tensor], kind: str) -> dict[int, Tensor]:
        return {int(key.split("/")[1]): tensor for key, tensor in held.items() if key.startswith(f"{kind}/")}

    def rebuild(self, passes: list[tuple[int, int, int]], entered: dict[int, Tensor]) -> None:
        """Run the forward passes in flight once more, each from what entered this stage and with the version it used.

        What they gave has been sent before saving.
        """
        self.recomputing = True
        self.arrived |= entered
        for update, k, version in passes:
            window = self.feed.ahead(update)
            assert window is not None
            self.turn_to(self.open(window))
            self.forward_with(self.stash[version], self.stage, k)
        self.recomputing = False


class OneVersion(WeightStashing, ABC):
    """All stages use the same version for a window: then an update may also be made of the gradients of several stages.

    Stages that clip by the norm of all of them, or share a parameter, wait for each other in every update. They do so as
    late as possible, right before the first forward pass that needs the new version: everything that another stage waits
    for until it gets there has been sent by then.
    """

    @abstractmethod
    def due(self, window: int) -> int:
        """The version that the window has to use, numbered among those that make an update."""

    def needed(self) -> set[int]:
        return super().needed() | {self.due(window) for window in self.to_come()}

    def to_come(self) -> range:
        """The windows that have not begun here and still will, numbered among those that make an update."""
        return range(self.opened, self.opened + self.begins_before - self.following)

    @property
    def together(self) -> bool:
        """Whether an update takes the gradients of several stages."""
        return self.case.optimizer.clip is not None or self.tied_apart

    def after_passes(self, update: int) -> None:
        if not self.together:
            super().after_passes(update)

    def before_forward(self, work: Underway) -> None:
        while self.together and self.steps < self.due(work.before):
            self.make_update(min(self.underway))

    def come_to_rest(self) -> None:
        while self.underway:
            self.make_update(min(self.underway))
        super().come_to_rest()


class VerticalSync(OneVersion):
    """Strategy pipedream-vertical-sync: all stages use what was the newest version on the first one when it began."""

    def claims(self) -> Claims:
        strategy = stale_strategy("pipedream-vertical-sync", "vertical-sync", drains=True)
        return Claims((strategy,), framework="equivtests textbook")

    def due(self, window: int) -> int:
        return max(self.drained, window - (self.layout.pp - 1))

    def version_for_forward(self, k: int) -> int:
        """It travels with the activations."""
        version = self.recv_version(k) if self.stage else self.version_to_begin_with()
        if self.stage < self.last:
            self.send_version(k, version)
        return version

    def version_to_begin_with(self) -> int:
        """The newest of the first stage."""
        return self.steps

    def send_version(self, k: int, version: int) -> None:
        self.send(
            torch.tensor([version], device=self.ranks.device), self.stage + 1, self.version_tag(self.stage + 1, k)
        )

    def recv_version(self, k: int) -> int:
        version = torch.zeros(1, dtype=torch.int64, device=self.ranks.device)
        dist.recv(version, self.rank_of(self.stage - 1), tag=self.version_tag(self.stage, k))
        return int(version)

    def version_tag(self, stage: int, k: int) -> int:
        """A number that no other message to the stage has."""
        return 2 * self.tag(stage, k, forward=True) + 1

    def tag(self, stage: int, k: int, forward: bool) -> int:
        return 2 * super().tag(stage, k, forward)


class TwoBuffered(OneVersion):
    """Strategy pipedream-2bw: windows are groups of at least P micro-batches, and use the version before the newest.

    The newest two versions are kept. Both are in a checkpoint, for which a group is finished.
    """

    def claims(self) -> Claims:
        strategy = stale_strategy("pipedream-2bw", "two-buffered", microbatches="stages", drains=True)
        return Claims((strategy,), framework="equivtests textbook")

    def due(self, window: int) -> int:
        return max(0, window - 1)

    def version_for_forward(self, k: int) -> int:
        return self.due(self.work.before)

    def to_come(self) -> range:
        """Always one more: the older buffer survives the end of what is fed."""
        return range(self.opened, self.opened + 1)


class PredictedWeights(WeightStashing):
    """Strategy pipedream-predicted: both passes use the newest version moved on along its momentum, by as many updates as
    the stage has not made yet of those that come before the window."""

    def claims(self) -> Claims:
        changes = ALONE | {"drains": True, "optimizers": frozenset({"momentum"})}
        return Claims((stale_strategy("pipedream-predicted", "predicted", **changes),), framework="equivtests textbook")

    def weights_for(self, k: int) -> Version:
        newest = super().weights_for(k)
        return Version(newest.number, {n: self.moved_on(n, leaf) for n, leaf in newest.leaves.items()})

    def moved_on(self, name: str, leaf: nn.Parameter) -> nn.Parameter:
        """W - updates · learning rate · momentum."""
        buffer = self.optimizer.state.get(self.newest[name], {}).get("momentum_buffer")
        if buffer is None:
            return nn.Parameter(leaf.detach().clone(), leaf.requires_grad)
        rate = self.optimizer.param_groups[0]["lr"]
        return nn.Parameter(leaf.detach().add(buffer, alpha=-self.missing() * rate), leaf.requires_grad)

    def missing(self) -> int:
        """Updates that come before the window, and that this stage has not made yet."""
        return self.work.before - self.steps

    def needed(self) -> set[int]:
        """Passes in flight have copies of their own."""
        return set()


def overwrite(version: Version, values: Mapping[str, Tensor]) -> None:
    """Put other values into the leaves of a version, past autograd's own check."""
    for name, leaf in version.leaves.items():
        leaf.data.copy_(values[name])
