"""Mutants of parameter servers that wait for no worker: versions, late gradients, what is on its way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equivtests.adapters.context import Ranks
from equivtests.adapters.textbook.async_server import AsyncServer, Gradients
from equivtests.cases.arrivals import windows_by_worker
from equivtests.cases.case import Case, Model, Optimizer
from equivtests.cases.layout import Layout
from equivtests.cases.stale_grid import SWINGING, arrivals
from equivtests.cases.windows import MicroBatch, Window
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import TINY_MLP
from equivtests.record.observation import Observe

FAST = Optimizer("sgd", lr=0.5)
SCHEDULED = Optimizer("sgd", lr=0.5, schedule=(0.5, 1.0, 0.25, 0.75, 1.0, 0.5))
SERVED = Model("gpt", depth=1, features=("bias",))


def served(name: str, model: Model, optimizer: Optimizer, workers: int = 3, servers: int = 1, rounds: int = 3) -> Case:
    windows, layout = arrivals(workers, servers, rounds), Layout(workers + servers)
    return Case(name, model, windows, layout, optimizer, accumulation=1, asynchronous="server")


ONE_SERVER = served("one-server", TINY_MLP, FAST)
ONE_SERVER_MOMENTUM = served("one-server-momentum", TINY_MLP, SWINGING)
ONE_SERVER_SCHEDULE = served("one-server-schedule", TINY_MLP, SCHEDULED)
TWO_SERVERS = served("two-servers", TINY_MLP, FAST, workers=2, servers=2, rounds=4)
FREE = served("any-order", SERVED, FAST)

# ---------------------------------------------------------------------------------------------- versions


@mutant(
    "ps-bound-ignored",
    strategy="ps-async-bounded",
    case=FREE,
    quantity="arrivals",
    source="constructed: what Ho et al. 2013, section 2, rule out",
    mistake="no worker ever waits for a slower one",
    chapter="replay",
)
class BoundIgnored(AsyncServer):
    """All pulls are answered at once, whatever comes first is processed."""

    def in_time(self, made: int, versions: list[int]) -> bool:
        return True


@mutant(
    "ps-newest-claimed",
    strategy="ps-async",
    case=ONE_SERVER,
    quantity="arrivals",
    source="constructed: Zhang et al. 2016, section 3, take staleness from the version that was pulled",
    mistake="a gradient is booked under the version that is there when it arrives",
)
class NewestClaimed(AsyncServer):
    """The server stamps what arrives with its own clock."""

    def process(self, worker: int, observe: Observe) -> None:
        self.inbox[worker][1] = self.steps
        super().process(worker, observe)


@mutant(
    "ps-older-than-reported",
    strategy="ps-async",
    case=ONE_SERVER,
    quantity="loss",
    source="constructed: weights are put into the model after the forward pass has begun",
    mistake="a worker reports the version that it pulled, and computes at the one that it pulled before",
)
class OlderThanReported(AsyncServer):
    """What is pulled is used one window late."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.pulled: dict[int, list[Tensor]] = {}

    def take_weights(self, server: int) -> None:
        super().take_weights(server)
        newest = [p.detach().clone() for _, p in self.share(server)]
        put(self.share(server), self.pulled.get(server, newest))
        self.pulled[server] = newest


@mutant(
    "ps-shard-lags",
    strategy="ps-async",
    case=TWO_SERVERS,
    quantity="loss",
    source="constructed: the mixture of versions that a pull from several servers can give",
    mistake="one of two servers answers pulls with the weights before its last update",
)
class ShardLags(AsyncServer):
    """The second server publishes a copy that is renewed before each step, not after it."""

    published: list[Tensor] | None = None

    def step_everything(self) -> None:
        self.published = [p.detach().clone() for _, p in self.share(self.ranks.rank)]
        super().step_everything()

    def answer(self, worker: int) -> None:
        share = self.share(self.ranks.rank)
        newest = [p.detach().clone() for _, p in share]
        if self.ranks.rank == self.servers[-1] and self.published is not None:
            put(share, self.published)
        super().answer(worker)
        put(share, newest)


def put(share: Sequence[tuple[str, Tensor]], tensors: list[Tensor]) -> None:
    """Set parameters to given values."""
    for (_, parameter), value in zip(share, tensors, strict=True):
        parameter.data.copy_(value)


# ---------------------------------------------------------------------------------------------- late gradients


@mutant(
    "ps-drop-counted",
    strategy="ps-async-drop",
    case=ONE_SERVER,
    quantity="step",
    source="constructed: a counter of gradients that arrived, taken for one of updates",
    mistake="a dropped gradient counts as a step, and the schedule moves",
)
class DroppedIsCounted(AsyncServer):
    """Nothing is applied, but all that goes by updates goes on."""

    def process(self, worker: int, observe: Observe) -> None:
        before = self.steps
        super().process(worker, observe)
        if self.steps == before:
            self.step_scheduler()
            self.steps += 1


@mutant(
    "ps-drop-moves-schedule",
    strategy="ps-async-drop",
    case=ONE_SERVER_SCHEDULE,
    quantity="learning rate",
    source="constructed: a scheduler that is stepped for every message",
    mistake="a dropped gradient moves the schedule of the learning rate",
)
class DropMovesSchedule(AsyncServer):
    """The step counter stays, the schedule does not."""

    def process(self, worker: int, observe: Observe) -> None:
        before = self.steps
        super().process(worker, observe)
        if self.steps == before:
            self.step_scheduler()


@mutant(
    "ps-drop-applied",
    strategy="ps-async-drop",
    case=ONE_SERVER,
    quantity="weight update",
    source="constructed: a late gradient that is left in the parameters' buffers",
    mistake="a late gradient is not dropped: it is added to the next one",
)
class DroppedLater(AsyncServer):
    """What was received is not cleared when it is refused."""

    left: Gradients | None = None

    def take_gradients(self, worker: int, present: list[int]) -> None:
        super().take_gradients(worker, present)
        named = [(name, p.grad) for name, p in self.share(self.ranks.rank) if p.grad is not None]
        for name, gradient in named:
            gradient += (self.left or {}).get(name, torch.zeros_like(gradient))
        self.left = {name: gradient.clone() for name, gradient in named}

    def step_everything(self) -> None:
        super().step_everything()
        self.left = None


@mutant(
    "ps-drop-steps-anyway",
    strategy="ps-async-drop",
    case=TWO_SERVERS,
    quantity="weight update",
    source="constructed: the bound is compared after the step",
    mistake="a late gradient is applied after all",
)
class DroppedAfterAll(AsyncServer):
    """Nothing is late."""

    def beyond(self, version: int) -> int:
        return 0


@mutant(
    "ps-weight-forgotten",
    strategy="ps-async-reweighted",
    case=ONE_SERVER,
    quantity="learning rate",
    source="constructed: Zhang et al. 2016, section 3, without its factor",
    mistake="late gradients count as much as others",
)
class WeightForgotten(AsyncServer):
    """The rate is that of a gradient in time."""

    def weight_of(self, beyond: int) -> float:
        return 1.0


@mutant(
    "ps-weight-of-all",
    strategy="ps-async-reweighted",
    case=ONE_SERVER,
    quantity="learning rate",
    source="constructed: staleness counted from the version, not from the bound",
    mistake="the rate is divided by 1 + all updates since the pull, also of those within the bound",
)
class WeightOfWholeStaleness(AsyncServer):
    """Every update between pull and arrival counts."""

    def beyond(self, version: int) -> int:
        return self.steps - version


@mutant(
    "ps-weight-in-arrivals",
    strategy="ps-async-reweighted",
    case=ONE_SERVER,
    quantity="learning rate",
    source="constructed: the staleness of the gradient before is used, as by a counter that is read too early",
    mistake="a late gradient is weighted by the staleness of the one before it",
)
class WeightOfThePrevious(AsyncServer):
    """The staleness is noted after the step."""

    noted = 0

    def weight_of(self, beyond: int) -> float:
        used, self.noted = self.noted, beyond
        return super().weight_of(used)


# ---------------------------------------------------------------------------------------------- what is applied


@mutant(
    "ps-applied-twice",
    strategy="ps-async",
    case=TWO_SERVERS,
    quantity="weight update",
    source="constructed: a push that is sent again after its acknowledgement was lost",
    mistake="one of two servers makes two steps with one gradient",
)
class AppliedTwice(AsyncServer):
    """The second server takes a repeated message for a new one."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.ranks.rank == self.servers[-1]:
            super().optimizer_step()


@mutant(
    "ps-another-window",
    strategy="ps-async",
    case=ONE_SERVER,
    quantity="samples",
    source="constructed: a loader that has gone on to the next window when the gradient is booked",
    mistake="a worker reports a window and feeds the samples of its next one",
)
class AnotherWindow(AsyncServer):
    """The loader is one window ahead of the number that is reported."""

    def compute(self, window: Window, observe: Observe) -> Gradients:
        later = self.todo[self.ranks.rank]
        ahead = self.feed.ahead(later[0]) if later else None
        return super().compute(Window(window.update, (ahead or window).microbatches), observe)


@mutant(
    "ps-decay-stale",
    strategy="ps-async",
    case=ONE_SERVER_MOMENTUM,
    quantity="gradient",
    source="constructed: weight decay as a part of the worker's loss",
    mistake="weight decay is added by the worker, of its stale weights",
)
class DecayOfStaleWeights(AsyncServer):
    """Decay is added to the gradient before it is pushed, and the servers leave it out."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [group | {"weight_decay": 0.0} for group in super().parameter_groups()]

    def accumulate(self, batches: list[Any]) -> Tensor:
        loss = super().accumulate(batches)
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and self.decays(name, parameter):
                parameter.grad += self.case.optimizer.weight_decay * parameter.detach()
        return loss


@mutant(
    "ps-decay-stale-on-server",
    strategy="ps-async",
    case=ONE_SERVER_MOMENTUM,
    quantity="weight update",
    source="constructed: decay from the weights that the gradient was computed at",
    mistake="weight decay acts on the version that the gradient is of, not on the newest weights",
)
class DecayOfThePulledVersion(AsyncServer):
    """The server keeps what it gave each worker, and decays that."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.given: dict[int, list[Tensor]] = {}

    def answer(self, worker: int) -> None:
        self.given[worker] = [p.detach().clone() for _, p in self.share(self.ranks.rank)]
        super().answer(worker)

    def take_gradients(self, worker: int, present: list[int]) -> None:
        super().take_gradients(worker, present)
        for (name, parameter), old in zip(self.share(self.ranks.rank), self.given[worker], strict=True):
            if parameter.grad is not None and self.decays(name, parameter):
                parameter.grad += self.case.optimizer.weight_decay * (old - parameter.detach())


@mutant(
    "ps-momentum-per-worker",
    strategy="ps-async",
    case=ONE_SERVER_MOMENTUM,
    quantity="weight update",
    source="constructed: optimizer state by connection",
    mistake="the servers keep a momentum buffer for every worker",
)
class MomentumPerWorker(AsyncServer):
    """Each worker's gradients meet the state that they left."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.states_of: dict[int, defaultdict[Tensor, Any]] = {}

    def take_gradients(self, worker: int, present: list[int]) -> None:
        super().take_gradients(worker, present)
        self.optimizer.state = self.states_of.setdefault(worker, defaultdict(dict))


# ---------------------------------------------------------------------------------------------- restore and replay


@mutant(
    "ps-save-loses-gradients",
    strategy="ps-async",
    case=ONE_SERVER,
    quantity="arrivals",
    source="constructed: a checkpoint of weights and optimizer alone",
    mistake="gradients on their way are lost by a checkpoint; their windows are computed again, at newer weights",
    chapter="restore",
)
class LosesGradients(AsyncServer):
    """After a restore all workers pull anew, and begin with the windows that were on their way."""

    def load_progress(self, saved: dict[str, Any], gradients: Gradients) -> None:
        super().load_progress(saved, gradients)
        for worker in [*self.computing, *([self.ranks.rank] if self.resend else [])]:
            own = windows_by_worker(self.case)[worker]
            self.todo[worker].insert(0, own[-1 - len(self.todo[worker])])
        self.computing, self.way, self.resend = {}, None, False


@mutant(
    "ps-save-forgets-version",
    strategy="ps-async",
    case=ONE_SERVER,
    quantity="arrivals",
    source="constructed: gradients are saved as tensors without what they were computed at",
    mistake="a gradient that was on its way is sent again as one of the version that was saved",
    chapter="restore",
)
class ForgetsVersion(AsyncServer):
    """A restored gradient is taken to be of the checkpoint's version."""

    def load_progress(self, saved: dict[str, Any], gradients: Gradients) -> None:
        if saved["way"] is not None:
            saved["way"][1] = saved["position"]
        super().load_progress(saved, gradients)


@mutant(
    "ps-replay-ignores-order",
    strategy="ps-async",
    case=FREE,
    quantity="replayed arrivals",
    source="constructed: what a seed alone cannot repeat",
    mistake="a run that is to follow a recorded order lets another gradient go first",
    chapter="replay",
)
class IgnoresOrder(AsyncServer):
    """Where the order is prescribed, it takes another one: whatever is not the next."""

    def due(self, window: int) -> bool:
        return True

    def choose(self, update: int) -> int | None:
        if not self.rule.arrivals:
            return super().choose(update)
        if len(self.inbox) < len(self.computing):
            return None
        wanted = super().choose(update)
        return next((worker for worker in self.inbox if worker != wanted), wanted)


@mutant(
    "ps-replay-other-sums",
    strategy="ps-async",
    case=FREE,
    quantity="replayed gradients",
    source="constructed: rows in the order in which a loader's threads deliver them",
    mistake="a replayed window has its rows in another order, so that its gradient is rounded otherwise",
    chapter="replay",
)
class RowsInAnotherOrder(AsyncServer):
    """The same samples, added up from the last to the first."""

    def compute(self, window: Window, observe: Observe) -> Gradients:
        if self.rule.arrivals:
            window = replace(window, microbatches=tuple(map(backwards, window.microbatches)))
        return super().compute(window, observe)


def backwards(batch: MicroBatch) -> MicroBatch:
    """The rows from the last to the first."""
    inputs, targets, valid, ids = (a[::-1].copy() for a in (batch.inputs, batch.targets, batch.valid, batch.ids))
    return MicroBatch(inputs, targets, valid, ids, batch.conditional)


@mutant(
    "ps-replay-half",
    strategy="ps-async",
    case=FREE,
    quantity="replayed state",
    source="constructed: a log of gradients in half precision",
    mistake="a replay applies gradients that were rounded to float16",
    chapter="replay",
)
class ReplayInHalf(AsyncServer):
    """The order is right, the numbers are nearly so."""

    def take_gradients(self, worker: int, present: list[int]) -> None:
        super().take_gradients(worker, present)
        for _, parameter in self.share(self.ranks.rank):
            if self.rule.arrivals and parameter.grad is not None:
                parameter.grad = parameter.grad.half().to(parameter.dtype)
