"""Mutants of checkpoints, one at least for every state that has to survive, and of schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from equivtests.adapters.context import Ranks
from equivtests.adapters.native.ddp import DDP
from equivtests.adapters.native.fsdp2 import FSDP2
from equivtests.adapters.textbook.collectives import all_gather
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.zero import Zero1, Zero2, Zero3
from equivtests.cases.case import Case
from equivtests.cases.windows import Feed, Window, window_of
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import (
    DROPOUT,
    GROWING_SCALE,
    MIDDLE,
    MIDDLE_DROPOUT,
    MIDDLE_RUNNING,
    MIDDLE_SCALED,
    MIDDLE_SGD,
    MIDDLE_SQUARE,
    MIDDLE_UNEVEN,
)
from equivtests.record.observation import Observe

# ---------------------------------------------------------------------------------------------- weights and layout


@mutant(
    "nemorl-async-stale",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="restored weights",
    source="NVIDIA-NeMo/RL#3312",
    mistake="every checkpoint repeats the first one",
    chapter="restore",
)
class FirstCheckpointRepeated(DataParallel):
    """The structure that is saved is cached together with its tensors, before the first update."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.cached = {name: t.clone() for name, t in super().tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        return self.cached


@mutant(
    "dcp-async-alias",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="restored weights",
    source="pytorch/pytorch#144657, #145408",
    mistake="an asynchronous save stores the values of the next update",
    chapter="restore",
)
class SavedTooLate(DataParallel):
    """Saving returns before anything is copied; the file is written after the next step."""

    late: Path | None = None

    def save_tensors(self, directory: Path) -> None:
        self.late = directory

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.late is not None:
            super().save_tensors(self.late)
            self.late = None


@mutant(
    "titan-uneven-resume",
    strategy="zero-1",
    case=MIDDLE_UNEVEN,
    quantity="restored weights",
    source="pytorch/torchtitan#1136",
    mistake="shards of uneven size are cut without their padding on load",
    chapter="restore",
)
class PaddingDropped(Zero1):
    """The saved vector is cut into chunks of total // ranks elements, so every shard but the first is shifted."""

    def load_shard(self, shard: Tensor) -> None:
        saved = all_gather(shard, self.shard_group)
        start = self.shard_index * (self.flat.total // self.shard_count)
        super().load_shard(saved[start : start + self.flat.chunk])


@mutant(
    "deepspeed-partition-order",
    strategy="zero-3",
    case=MIDDLE_SGD,
    quantity="restored layout",
    source="deepspeedai/DeepSpeed#5283",
    mistake="the files of ranks are put together in another order than they were written",
    chapter="restore",
)
class FilesOutOfOrder(Zero3):
    """A rank loads another rank's shard: files are listed in an order that is not the ranks'."""

    def load_tensors(self, directory: Path) -> None:
        files = sorted(directory.glob("rank-*.safetensors"), reverse=True)
        self.load_shard(load_file(files[self.ranks.rank])["shard"])


# ---------------------------------------------------------------------------------------------- optimizer


@mutant(
    "hf-fsdp-optim-load",
    strategy="fsdp2",
    case=MIDDLE,
    quantity="restored optimizer state",
    source="huggingface/transformers#25849; areal-project/AReaL#1468",
    mistake="the optimizer's state is not loaded, without a word",
    chapter="restore",
)
class FreshMoments(FSDP2):
    """Weights and step are loaded, moments are not: Adam starts afresh."""

    def load_tensors(self, directory: Path) -> None:
        saved = {"model": get_model_state_dict(self.model)}
        dcp.load(saved, checkpoint_id=directory / "sharded")
        set_model_state_dict(self.model, saved["model"])


@mutant(
    "deepspeed-cpu-adam-step",
    strategy="zero-2",
    case=MIDDLE,
    quantity="restored optimizer state",
    source="deepspeedai/DeepSpeed#564",
    mistake="Adam's step counters do not survive, so bias correction starts again",
    chapter="restore",
)
class CountersRestart(Zero2):
    """Moments are loaded, step counters are not."""

    def load_optimizer(self, saved: dict[str, Tensor]) -> None:
        restarted = {name: torch.zeros_like(t) for name, t in saved.items() if name.endswith("/step")}
        super().load_optimizer(saved | restarted)


@mutant(
    "optim-positional-keys",
    strategy="ddp",
    case=MIDDLE_SQUARE,
    quantity="restored optimizer state",
    source="pytorch/pytorch#113673, #84651; facebookresearch/fairscale#601",
    mistake="optimizer state is matched by position, and parameters come in another order",
    chapter="restore",
)
class AnotherOrder(DDP):
    """The resumed run lists its parameters in another order; equal shapes let moments be exchanged in silence."""

    def load_tensors(self, directory: Path) -> None:
        for group in self.optimizer.param_groups:
            group["params"].reverse()
        super().load_tensors(directory)


# ---------------------------------------------------------------------------------------------- schedule and counters


@mutant(
    "chainermn-rate-restarts",
    strategy="dp",
    case=MIDDLE,
    quantity="restored schedule",
    source="chainer/chainermn#225; lightly-ai/lightly-train#301",
    mistake="the position in the learning-rate schedule is not restored",
    chapter="restore",
)
class ScheduleRestarts(DataParallel):
    """The scheduler of the resumed run begins at its first step."""

    def load_schedule(self, step: int) -> None:
        super().load_schedule(0)


@mutant(
    "paddleocr-global-step",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="restored step",
    source="PaddlePaddle/PaddleOCR#18108; pytorch/torchtitan#571",
    mistake="the global step is saved but starts at 0 again",
    chapter="restore",
)
class StepRestarts(DataParallel):
    """The training loop sets its step counter after loading."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.steps = 0


@mutant(
    "hf-scaler-not-saved",
    strategy="dp",
    case=MIDDLE_SCALED,
    quantity="restored loss scale",
    source="huggingface/transformers#34053; pytorch/torchtitan#146",
    mistake="the loss scale is not saved, so it starts at its initial value",
    chapter="restore",
)
class ScaleRestarts(DataParallel):
    """The checkpoint does not know the loss scaler."""

    def load_trainer_state(self, saved: dict[str, Any]) -> None:
        fresh = [self.loss_scale, self.growth]
        super().load_trainer_state(saved | {"loss_scale": fresh})


@mutant(
    "metaseq-growth-counter",
    strategy="dp",
    case=GROWING_SCALE,
    quantity="loss scale",
    source="facebookresearch/metaseq#3",
    mistake="the scale is restored, the number of good updates since it grew is not",
    chapter="restore",
)
class GrowthRestarts(DataParallel):
    """The scale grows later than it would have without the restart."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.growth = 0


@mutant(
    "accelerate-lr-n-times",
    strategy="dp",
    case=MIDDLE,
    quantity="learning rate",
    source="huggingface/transformers#24088; huggingface/accelerate#2142, #2926; huggingface/diffusers#3954",
    mistake="the schedule advances once per process at every update",
)
class ScheduleTimesRanks(DataParallel):
    """The wrapper makes W steps of the schedule for a loader length that was global already."""

    def step_everything(self) -> None:
        super().step_everything()
        for _ in range(self.ranks.world - 1):
            self.scheduler.step()


@mutant(
    "burn-lr-microbatch",
    strategy="dp",
    case=MIDDLE,
    quantity="learning rate",
    source="tracel-ai/burn#5695",
    mistake="the schedule advances at every micro-batch",
)
class ScheduleTimesMicroBatches(DataParallel):
    """The schedule's step stands inside the accumulation loop."""

    def after_backward(self, k: int) -> None:
        if k > 0:
            self.scheduler.step()


# ---------------------------------------------------------------------------------------------- dropout and buffers


@mutant(
    "swift-reseed",
    strategy="dp",
    case=MIDDLE_DROPOUT,
    quantity="restored random state",
    source="modelscope/ms-swift#9935",
    mistake="the restored random state is overwritten by a later call of seed",
    chapter="restore",
)
class SeededAfterLoading(DataParallel):
    """Setting up the loader after the checkpoint seeds again, so dropout repeats that of the first updates."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.stream.draw = 0


@mutant(
    "sat-unequal-draws",
    strategy="dp",
    case=DROPOUT,
    quantity="random state",
    source="THUDM/SwissArmyTransformer#155",
    mistake="ranks draw unequal numbers of random values while they set up",
)
class ExtraDraw(DataParallel):
    """One rank builds something that the others do not, and its random state runs ahead."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.stream.draw += int(ranks.rank == 1)


@mutant(
    "fairseq2-buffers-rank0",
    strategy="dp",
    case=MIDDLE_RUNNING,
    quantity="restored buffers",
    source="facebookresearch/fairseq2#1245",
    mistake="buffers are saved by rank 0 and loaded by rank 0 alone",
    chapter="restore",
)
class BuffersOnRankZero(DataParallel):
    """Other ranks go on with initial running statistics."""

    def load_weights(self, saved: dict[str, Tensor]) -> None:
        own = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        super().load_weights(saved if self.ranks.rank == 0 else saved | own)


# ---------------------------------------------------------------------------------------------- data


@mutant(
    "neox-gas-position",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="restored cursor",
    source="EleutherAI/gpt-neox#308",
    mistake="the loader is moved on by updates where it counts micro-batches",
    chapter="restore",
)
class PositionWithoutAccumulation(DataParallel):
    """Fast-forwarding by `step` micro-batches instead of `step` times K: data are repeated."""

    def load_trainer_state(self, saved: dict[str, Any]) -> None:
        super().load_trainer_state(saved | {"cursor": saved["cursor"] // self.case.accumulation})


@mutant(
    "verl-epoch-boundary",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="restored cursor",
    source="verl-project/verl#7401",
    mistake="an exhausted loader is restored, and training ends at once",
    chapter="restore",
)
class ExhaustedLoader(DataParallel):
    """The loader's state says that it has been read to its end: no update follows, and no error."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.feed.seek(self.case.updates)


@mutant(
    "lhotse-prefetch-position",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="cursor",
    source="lhotse-speech/lhotse#785",
    mistake="the loader's position counts what was prefetched, not what was trained on",
)
class PrefetchCounted(DataParallel):
    """The next window is drawn before the current one is used, so a checkpoint would skip it."""

    def run(self, feed: Feed, observe: Observe) -> None:
        self.show_state(observe, feed.position)
        ahead = next(feed, None)
        while ahead is not None:
            window, ahead = ahead, next(feed, None)
            self.update(window, observe)


class Loader(DataParallel):
    """The loader has state of its own: which rank's share it reads, and how many epochs it has been restarted."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.share, self.behind = ranks.rank, 0

    def update(self, window: Window, observe: Observe) -> None:
        drawn = window_of(self.case, window.update - self.behind, self.share)
        super().update(Window(window.update, drawn.microbatches), observe)


@mutant(
    "accelerate-resume-epoch",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="samples",
    source="huggingface/accelerate#4071, #2016, #2823",
    mistake="the loader of a resumed run counts its epochs from 0",
    chapter="restore",
)
class EpochRestarts(Loader):
    """Each window here is an epoch: after loading, the samples are those of epoch 0, at the right position."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.behind = self.feed.position


@mutant(
    "primerl-loader-dedup",
    strategy="dp",
    case=MIDDLE_SGD,
    quantity="samples",
    source="PrimeIntellect-ai/prime-rl#1035",
    mistake="the state of all ranks' loaders is saved once, as if they were copies",
    chapter="restore",
)
class OneLoaderForAll(Loader):
    """All ranks go on with the loader of rank 0."""

    def trainer_state(self) -> dict[str, Any]:
        return super().trainer_state() | {"share": self.share}

    def load_trainer_state(self, saved: dict[str, Any]) -> None:
        super().load_trainer_state(saved)
        self.share = saved["share"]
