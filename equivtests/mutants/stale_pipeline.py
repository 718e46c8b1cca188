"""Mutants of pipelines that are never flushed: versions that passes use, what updates are made of, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equivtests.adapters.context import Ranks
from equivtests.adapters.textbook.stale_pipeline import (
    PredictedWeights,
    TwoBuffered,
    Version,
    VerticalSync,
    WeightStashing,
    overwrite,
)
from equivtests.cases.case import DOUBLE, Case, Optimizer
from equivtests.cases.stale_grid import FAST, GROUPS, MLP, ONE_EACH, SWINGING
from equivtests.mutants.mutant import mutant
from equivtests.mutants.split_situations import split_situation
from equivtests.reference.timeline import Operation

SCHEDULED = Optimizer("momentum", lr=0.25, momentum=0.5, schedule=(0.5, 1.0, 0.75, 0.25))

SIX_LAYERS = replace(MLP, depth=6)
STREAM: dict[str, Any] = {"asynchronous": "pipeline"}
STREAMED = split_situation("streamed", "pp3", SIX_LAYERS, ONE_EACH, FAST, **STREAM)
STREAMED_MOMENTUM = split_situation(
    "streamed-momentum", "pp3", SIX_LAYERS, ONE_EACH, SWINGING, precision=DOUBLE, **STREAM
)
STREAMED_GROUPS = split_situation("streamed-groups", "pp3", SIX_LAYERS, GROUPS, SCHEDULED, precision=DOUBLE, **STREAM)

# ---------------------------------------------------------------------------------------------- order, versions of passes


@mutant(
    "stale-fills-deeper",
    strategy="pipedream",
    case=STREAMED,
    quantity="schedule",
    source="constructed: a warm-up counted from the number of stages, not from those behind this one",
    mistake="the first stage begins one micro-batch more before its first backward pass than 1F1B does",
)
class FillsDeeper(WeightStashing):
    """One more activation and one more version are kept, and weights are staler than they have to be."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.warmup += self.stage == 0


@mutant(
    "pipedream-no-stash",
    strategy="pipedream",
    case=STREAMED,
    quantity="versions",
    source="constructed: what Narayanan et al. 2019, PipeDream, section 3.3, stash weights against",
    mistake="no version is kept: the backward pass uses the weights that are there when it runs",
)
class NoStash(WeightStashing):
    """Gradients are of no weights that there ever were."""

    def version_for_backward(self, k: int) -> int:
        return self.steps


@mutant(
    "pipedream-inplace-stash",
    strategy="pipedream",
    case=STREAMED,
    quantity="gradient",
    source="msr-fiddle/pipedream#52",
    mistake="versions are put into the same parameters in place, past autograd's check, after the forward pass",
)
class StashedInPlace(WeightStashing):
    """The stashed version is named, and what the graph refers to holds the newest."""

    @contextmanager
    def reading(self, used: Version, number: int) -> Iterator[None]:
        overwrite(used, self.newest)
        yield


@mutant(
    "stale-too-old",
    strategy="pipedream",
    case=STREAMED,
    quantity="versions",
    source="constructed: a ring of versions that is read one place too far back",
    mistake="the forward pass uses the version before the newest",
)
class OneTooOld(WeightStashing):
    """Staleness is one update more than there has to be."""

    def version_for_forward(self, k: int) -> int:
        return max(0, self.steps - 1)

    def needed(self) -> set[int]:
        return super().needed() | {self.steps - 1}


@mutant(
    "stale-too-new",
    strategy="pipedream-vertical-sync",
    case=STREAMED,
    quantity="versions",
    source="constructed: versions counted from one on the first stage, from zero on the others",
    mistake="stages behind the first use the version after the one that came with the activations",
)
class OneTooNew(VerticalSync):
    """Where the stage has made that version already."""

    def version_for_forward(self, k: int) -> int:
        version = super().version_for_forward(k)
        return version + 1 if self.stage and version + 1 in self.stash else version


@mutant(
    "stale-one-stage-alone",
    strategy="pipedream-vertical-sync",
    case=STREAMED,
    quantity="versions",
    source="constructed: a stage that was configured apart",
    mistake="one stage uses its newest version, the others that of the first stage",
)
class OneStageAlone(VerticalSync):
    """It stashes by itself, and says so."""

    def version_for_forward(self, k: int) -> int:
        synchronized = super().version_for_forward(k)
        return self.steps if self.stage == 1 else synchronized


@mutant(
    "stale-version-misreported",
    strategy="pipedream-vertical-sync",
    case=STREAMED,
    quantity="output",
    source="constructed: a version number that is passed along beside the weights",
    mistake="one stage uses its newest version, and reports the one that it should have used",
)
class Misreported(VerticalSync):
    """Only the numbers tell."""

    def version_for_forward(self, k: int) -> int:
        synchronized = super().version_for_forward(k)
        return self.steps if self.stage == 1 else synchronized

    def noted(self, operation: Operation) -> tuple[int, int, int, int]:
        kind, stage, microbatch, _ = super().noted(operation)
        return kind, stage, microbatch, self.due(self.work.before)


@mutant(
    "vertical-sync-never-on",
    strategy="pipedream-vertical-sync",
    case=STREAMED,
    quantity="versions",
    source="constructed: vertical sync is an option that nothing reads",
    mistake="vertical sync is asked for, weight stashing runs",
)
class NeverSynchronized(VerticalSync):
    """Every stage uses its newest version."""

    def version_for_forward(self, k: int) -> int:
        super().version_for_forward(k)
        return self.steps


@mutant(
    "vertical-sync-unasked",
    strategy="pipedream",
    case=STREAMED,
    quantity="versions",
    source="constructed: vertical sync where stashing is documented",
    mistake="weight stashing is asked for, vertical sync runs",
)
class SynchronizedUnasked(WeightStashing):
    """Later stages use older versions than they have."""

    def version_for_forward(self, k: int) -> int:
        return max(0, self.work.before - (self.layout.pp - 1))

    def needed(self) -> set[int]:
        return super().needed() | set(range(max(0, self.opened - self.layout.pp), self.steps))


@mutant(
    "2bw-third-version",
    strategy="pipedream-2bw",
    case=STREAMED_GROUPS,
    quantity="live versions",
    source="constructed: what Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training, section 3.1, save",
    mistake="a version is dropped one group later than it could be",
)
class ThirdVersion(TwoBuffered):
    """All numbers are right, the memory is not."""

    def to_come(self) -> range:
        return range(self.opened - 1, self.opened + 1)


@mutant(
    "2bw-swapped-early",
    strategy="pipedream-2bw",
    case=STREAMED_GROUPS,
    quantity="versions",
    source="constructed: buffers swapped with the update, not with the group",
    mistake="micro-batches use the new version as soon as the stage has made it",
)
class SwappedEarly(TwoBuffered):
    """On the first stages in the middle of a group."""

    def version_for_forward(self, k: int) -> int:
        return self.steps


# ---------------------------------------------------------------------------------------------- updates


@mutant(
    "stale-decay",
    strategy="pipedream",
    case=STREAMED_MOMENTUM,
    quantity="weight update",
    source="constructed: an optimizer that is handed the parameters of the backward pass",
    mistake="coupled weight decay is computed from the version that the gradient is of, not from the newest",
)
class StaleDecay(WeightStashing):
    """The gradient that the optimizer adds to it is right."""

    def accumulate_from(self, version: Version) -> None:
        super().accumulate_from(version)
        self.differentiated_at = version

    def optimizer_step(self) -> None:
        for group in self.optimizer.param_groups:
            for name, parameter in self.newest.items():
                if any(parameter is p for p in group["params"]):
                    behind = self.differentiated_at.leaves[name].detach() - parameter.detach()
                    parameter.grad = parameter.grad + group["weight_decay"] * behind
        super().optimizer_step()


@mutant(
    "momentum-per-version",
    strategy="pipedream",
    case=STREAMED_MOMENTUM,
    quantity="weight update",
    source="constructed: an optimizer for every slot of the stash",
    mistake="every slot of the stash has a momentum buffer of its own",
)
class MomentumPerVersion(WeightStashing):
    """Momentum is of every second or third gradient."""

    def optimizer_step(self) -> None:
        slots: dict[tuple[int, str], Any] = self.__dict__.setdefault("slots", {})
        for name, parameter in self.newest.items():
            self.optimizer.state[parameter] = slots.setdefault((self.steps % (self.warmup + 1), name), {})
        super().optimizer_step()


@mutant(
    "stale-wrong-slot",
    strategy="pipedream",
    case=STREAMED,
    quantity="gradient",
    source="constructed: gradients are read from the slot that the next forward pass will use",
    mistake="the optimizer takes the gradients that lie in the slot of another mini-batch",
)
class WrongSlot(WeightStashing):
    """In the newest slot nothing has been accumulated, but on the last stage."""

    def accumulate_from(self, version: Version) -> None:
        super().accumulate_from(self.stash[self.steps])


@mutant(
    "spectrain-one-too-few",
    strategy="pipedream-predicted",
    case=STREAMED_MOMENTUM,
    quantity="output",
    source="constructed: Chen et al. 2018, SpecTrain, section 3.3, with the update in flight left out",
    mistake="weights are predicted one update short of what the stage lacks",
)
class OneUpdateShort(PredictedWeights):
    """The stage before the last one predicts nothing."""

    def missing(self) -> int:
        return max(0, super().missing() - 1)


@mutant(
    "2bw-schedule-by-microbatch",
    strategy="pipedream-2bw",
    case=STREAMED_GROUPS,
    quantity="learning rate",
    source="constructed: a scheduler that is stepped with the engine's micro-batches",
    mistake="the learning-rate schedule counts micro-batches",
)
class ScheduleByMicroBatch(TwoBuffered):
    """A group moves it by as many steps as it has micro-batches."""

    def perform(self, operation: Operation) -> None:
        super().perform(operation)
        if operation.kind == "B":
            self.scheduler.step()

    def step_scheduler(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------- checkpoints


@mutant(
    "2bw-one-buffer-saved",
    strategy="pipedream-2bw",
    case=STREAMED_GROUPS,
    quantity="versions",
    chapter="restore",
    source="constructed: a checkpoint of the model, which has one of two buffers",
    mistake="of the two versions only the newest is in the checkpoint",
)
class OneBufferSaved(TwoBuffered):
    """The first group after it uses the newest version."""

    def stashed_tensors(self) -> dict[str, Tensor]:
        saved = super().stashed_tensors()
        return {key: tensor for key, tensor in saved.items() if key.startswith(f"stash/{self.steps}/")}

    def version_for_forward(self, k: int) -> int:
        version = super().version_for_forward(k)
        return version if version in self.stash else self.steps


@mutant(
    "pipedream-stash-not-saved",
    strategy="pipedream",
    case=STREAMED,
    quantity="versions",
    chapter="restore",
    source="constructed: a checkpoint of the newest weights and of what is in flight",
    mistake="the stash is not saved: forward passes in flight are run again with the newest weights",
)
class StashNotSaved(WeightStashing):
    """Their backward passes use other weights than without the checkpoint."""

    def rebuild(self, passes: list[tuple[int, int, int]], entered: dict[int, Tensor]) -> None:
        super().rebuild([(update, k, self.steps) for update, k, _ in passes], entered)


@mutant(
    "pipedream-activation-lost",
    strategy="pipedream",
    case=STREAMED,
    quantity="output",
    chapter="restore",
    source="constructed: a buffer that is saved before the message is in it",
    mistake="the activation that is on its way between two stages is lost with the checkpoint",
)
class ActivationLost(WeightStashing):
    """The receiver goes on with zeros."""

    def numbered_tensors(self, held: dict[str, Tensor], kind: str) -> dict[int, Tensor]:
        found = super().numbered_tensors(held, kind)
        return found if kind == "entered" else {number: torch.zeros_like(x) for number, x in found.items()}


@mutant(
    "pipedream-activation-twice",
    strategy="pipedream",
    case=STREAMED,
    quantity="output",
    chapter="restore",
    source="constructed: a saved message that is not taken out of the mailbox",
    mistake="the activation that was on its way when saving enters the stage twice",
)
class ActivationTwice(WeightStashing):
    """The next micro-batch goes on with it, its own activation is thrown away."""

    def load(self, directory: Any) -> None:
        super().load(directory)
        self.left_over = dict(self.arrived)

    def recv_forward(self, stage: int, k: int) -> Tensor:
        x = super().recv_forward(stage, k)
        old = self.__dict__.get("left_over", {}).pop(self.work.first + k - 1, None)
        return x if old is None else old.detach().clone().requires_grad_()


@mutant(
    "vertical-sync-resumes-full",
    strategy="pipedream-vertical-sync",
    case=STREAMED,
    quantity="versions",
    chapter="restore",
    source="constructed: versions counted back from the mini-batch, whatever is in flight",
    mistake="after a checkpoint that drained, mini-batches use versions as old as if the pipeline were full",
)
class ResumesFull(VerticalSync):
    """Without a checkpoint it is right."""

    def due(self, window: int) -> int:
        return max(0, window - (self.layout.pp - 1))

    def to_come(self) -> range:
        return range(self.opened, self.opened + self.layout.pp)

    def version_to_begin_with(self) -> int:
        return self.due(self.work.before)
