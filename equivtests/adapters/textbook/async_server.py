"""Parameter servers that wait for no worker: every gradient is applied when it arrives, to weights newer than its own.

Workers pull weights, compute the gradient of their next window and push it. Servers hold whole parameters by turns,
make a step when a gradient is processed, and number the versions of their weights. The first server decides in which
order gradients are processed and pulls answered, and tells the others (Li et al. 2014, Scaling distributed machine
learning with the parameter server, section 3.5: eventual consistency). Staleness may be bounded, and workers wait (Ho et
al. 2013, More effective distributed ML via a stale synchronous parallel parameter server, section 2; here the bound counts
updates, not clocks); or late gradients are dropped, or count less (Zhang et al. 2016, Staleness-aware async-SGD, section 3).

Where the case names an order of arrival, gradients wait at the servers until it is their turn, and pulls until their
version is there. Where it names none, whatever comes first is processed first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from equivtests.adapters.adapter import MANDATORY, Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.adapters.places import show
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.torch_adapter import Counts, Shown
from equivtests.cases import numbers
from equivtests.cases.arrivals import declared, in_time, windows_by_worker
from equivtests.cases.case import Case, Semantics
from equivtests.cases.windows import Feed, Window
from equivtests.record.observation import Observe, Place

RULES: dict[str, Callable[[Case], Semantics]] = {
    "ps-async": declared,
    "ps-async-bounded": partial(declared, bound=1),
    "ps-async-drop": partial(declared, bound=1, late="dropped"),
    "ps-async-reweighted": partial(declared, bound=1, late="reweighted"),
}
"""By strategy, the order of arrival and what becomes of late gradients."""

PULL, PUSH = 0, 1  # what the first server tells the others: answer a worker's pull, process a worker's gradient
STOP, HELD = -1, -2  # instead of a version: training pauses; and the worker's last gradient is still on its way
HEAD = 3  # of a header: window, version, whether there is a gradient; then the same for each parameter of the share
ORDERS, ANSWERS, WEIGHTS, HEADERS, GRADIENTS = range(1, 6)  # tags of messages
LONGEST_DELAY = 2.0**-8  # seconds

Gradients = dict[str, Tensor]
"""By parameter; absent where the window does not use it."""


class AsyncServer(DataParallel):
    """The ranks that no window feeds are servers, the others workers.

    todo: by worker, the windows that it has yet to begin.
    Of servers: computing: by worker, the version that its next gradient is of. inbox: by worker, the header of a gradient
    that arrived and is not processed.
    Of workers: way: window, version and tensors of the last gradient, until it is known to be processed. resend: whether
    it has to be pushed again, after a restore.
    """

    def claims(self) -> Claims:
        like = Strategy(
            "ps-async",
            worlds=frozenset({3, 4}),
            asynchronous="server",
            updates=2,
            clips=frozenset(),
            restores=True,
            replays=True,
            observes=MANDATORY | {"tokens", "lr", "state", "step", "arrival"},
        )
        plain = ("ps-async", "ps-async-drop")
        strategies = (replace(like, name=n, semantics=rule, variant=n not in plain) for n, rule in RULES.items())
        return Claims(tuple(strategies), framework="equivtests textbook")

    # ------------------------------------------------------------------ who does what

    def setup(self, case: Case, ranks: Ranks) -> None:
        self.todo = windows_by_worker(case)
        self.servers = [rank for rank in range(ranks.world) if rank not in self.todo]
        self.rule = RULES[self.strategy](case).staleness
        gloo = ranks.backend == "gloo"
        self.wire = None if gloo else dist.new_group(backend="gloo")  # the backend that can take from any rank
        self.computing: dict[int, int] = {}
        self.inbox: dict[int, list[int]] = {}
        self.way: tuple[int, int, Gradients] | None = None
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.resend = False
        super().setup(case, ranks)

    @property
    def serving(self) -> bool:
        return self.ranks.rank in self.servers

    @property
    def leads(self) -> bool:
        return self.ranks.rank == self.servers[0]

    def share(self, server: int) -> Sequence[tuple[str, Tensor]]:
        """The parameters that a server holds: by turns."""
        named = list(self.module.named_parameters())
        return named[self.servers.index(server) :: len(self.servers)]

    def shown(self) -> Iterator[Shown]:
        """What a server holds; a worker's copy of everything."""
        named = self.share(self.ranks.rank) if self.serving else self.module.named_parameters()
        for name, parameter in named:
            yield name, parameter, Place(tuple(parameter.shape), replica=self.ranks.rank)

    def run(self, feed: Feed, observe: Observe) -> None:
        if self.serving:
            super().run(feed, observe)
            self.pause_workers()
        else:
            self.work(observe)
            feed.seek(feed.stop)

    def send(self, message: Tensor, rank: int, tag: int) -> None:
        """Send to a rank that is about to take it."""
        dist.send(message, rank, group=self.wire, tag=tag)

    def receive(self, message: Tensor, rank: int, tag: int) -> Tensor:
        """Fill a tensor with what a rank sends."""
        dist.recv(message, rank, group=self.wire, tag=tag)
        return message

    # ------------------------------------------------------------------ a worker

    def work(self, observe: Observe) -> None:
        """Window after window, until the servers pause."""
        self.send_again(observe)
        while (version := self.pull()) >= 0:
            window = self.next_window()
            self.dawdle(window)
            self.way = (window.update, version, self.compute(window, observe))
            self.push(*self.way)

    def next_window(self) -> Window:
        window = self.feed.ahead(self.todo[self.ranks.rank].pop(0))
        assert window is not None
        return window

    def dawdle(self, window: Window) -> None:
        """Where the order is free, take a time of one's own, so that orders differ."""
        if not self.rule.arrivals:
            drawn = numbers.real(self.case.seed, f"delay.{window.update}", (1,))
            time.sleep(abs(float(drawn[0])) * LONGEST_DELAY)

    def pull(self) -> int:
        """Take the weights of every server; returns their version, or STOP or HELD where training pauses."""
        version = STOP
        for server in self.servers:
            version = int(self.receive(torch.zeros(1, dtype=torch.int64), server, ANSWERS))
            if version >= 0:
                self.take_weights(server)
        if version != HELD:
            self.forget_pushed()
        return version

    def take_weights(self, server: int) -> None:
        tensors = [p.data for _, p in self.share(server)]
        if tensors:
            flat = self.receive(torch.empty_like(_flatten_dense_tensors(tensors), device="cpu"), server, WEIGHTS)
            for tensor, new in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
                tensor.copy_(new)

    def compute(self, window: Window, observe: Observe) -> Gradients:
        """The gradient of a window, shown whole: nobody else has a part of it."""
        self.window, self.counts = window, self.count(window)
        observe("tokens", "tokens", np.int64(self.counts.tokens.sum()), update=window.update)
        if self.counts.tokens.sum() > 0:
            loss = self.accumulate(list(window.microbatches))
            self.show_update(observe, loss)
        found = {name: gradient.cpu() for name, gradient, _ in self.gradients()}
        self.optimizer.zero_grad()
        return found

    def count(self, window: Window) -> Counts:
        return Counts(self.own_counts(window).numpy())

    def averaged(self) -> int:
        return 1

    def loss_place(self) -> Place:
        return Place(())

    def push(self, window: int, version: int, gradients: Gradients) -> None:
        """Send every server its part; a server takes it when it is ready."""
        for server in self.servers:
            share = self.share(server)
            header = torch.tensor(
                [window, version, int(bool(gradients)), *(int(name in gradients) for name, _ in share)]
            )
            self.post(header, server, HEADERS)
            sent = [gradients[name] for name, _ in share if name in gradients]
            if sent:
                self.post(_flatten_dense_tensors(sent), server, GRADIENTS)

    def post(self, message: Tensor, server: int, tag: int) -> None:
        """Send without waiting; the message is kept until its gradient is known to be processed."""
        work = dist.isend(message, server, group=self.wire, tag=tag)
        assert work is not None
        self.sending.append((work, message))

    def forget_pushed(self) -> None:
        """The last gradient was processed, so all of it has arrived."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
        self.way = None

    # ------------------------------------------------------------------ a server

    def update(self, window: Window, observe: Observe) -> None:
        """Process the gradient that arrives next. Pulls that are due are answered before."""
        self.window = window
        worker = self.decide(window.update) if self.leads else self.follow()
        self.process(worker, observe)
        self.show_state(observe, window.update + 1)

    def decide(self, update: int) -> int:
        """The first server's part: whose pulls are answered, whose gradient is next."""
        for worker in self.todo:
            if worker not in self.computing and self.todo[worker] and self.may_pull(worker):
                self.tell(PULL, worker)
                self.answer(worker)
        while (chosen := self.choose(update)) is None:
            self.take_any()
        self.tell(PUSH, chosen)
        return chosen

    def tell(self, order: int, worker: int) -> None:
        for server in self.servers[1:]:
            self.send(torch.tensor([order, worker]), server, ORDERS)

    def follow(self) -> int:
        """Do as the first server says, up to the next gradient; returns whose it is."""
        while True:
            order, worker = self.receive(torch.zeros(2, dtype=torch.int64), self.servers[0], ORDERS).tolist()
            if order == PUSH:
                self.inbox[worker] = self.receive(self.empty_header(), worker, HEADERS).tolist()
                return worker
            self.answer(worker)

    def may_pull(self, worker: int) -> bool:
        """Whether a pull is answered now: at its version, or when its gradient cannot come too late."""
        if self.rule.arrivals:
            return self.due(self.todo[worker][0])
        return self.in_time(self.steps, [*self.computing.values(), self.steps])

    def due(self, window: int) -> bool:
        """Whether the version that a window is to be computed at is there."""
        return self.steps >= dict(self.rule.arrivals)[window]

    def choose(self, update: int) -> int | None:
        """Whose gradient is processed next, or None if it has not come."""
        if self.rule.arrivals:
            wanted = self.rule.arrivals[update][0]
            return next((worker for worker, (window, *_) in self.inbox.items() if window == wanted), None)
        return next((worker for worker in self.inbox if self.may_be_next(worker)), None)

    def may_be_next(self, worker: int) -> bool:
        """Whether no other gradient on the way would come too late."""
        return self.in_time(self.steps + 1, [v for other, v in self.computing.items() if other != worker])

    def in_time(self, made: int, versions: list[int]) -> bool:
        return in_time(made, versions, self.rule.bound if self.rule.late == "refused" else None)

    def take_any(self) -> None:
        """Wait for a gradient of any worker."""
        header = self.empty_header()
        worker = dist.recv(header, group=self.wire, tag=HEADERS)
        self.inbox[worker] = header.tolist()

    def empty_header(self) -> Tensor:
        return torch.zeros(HEAD + len(self.share(self.ranks.rank)), dtype=torch.int64)

    def answer(self, worker: int) -> None:
        """Give a worker this server's weights, and their version."""
        self.computing[worker] = self.steps
        self.todo[worker].pop(0)
        self.send(torch.tensor([self.steps]), worker, ANSWERS)
        tensors = [p.detach() for _, p in self.share(self.ranks.rank)]
        if tensors:
            self.send(_flatten_dense_tensors(tensors).cpu(), worker, WEIGHTS)

    def process(self, worker: int, observe: Observe) -> None:
        """Apply, or drop, the gradient of a worker that has arrived."""
        window, version, used, *present = self.inbox.pop(worker)
        del self.computing[worker]
        self.take_gradients(worker, present)
        arrival, here = np.array([window, version]), Place((2,), replica=self.ranks.rank)
        observe("arrival", "arrival", arrival, update=self.window.update, place=here)
        beyond = self.beyond(version)
        if used and not (beyond and self.rule.late == "dropped"):
            self.apply(beyond, observe)
        self.optimizer.zero_grad()

    def take_gradients(self, worker: int, present: list[int]) -> None:
        """Receive this server's part of a gradient into its parameters."""
        used = [p for (_, p), yes in zip(self.share(self.ranks.rank), present, strict=True) if yes]
        if used:
            flat = self.receive(torch.empty_like(_flatten_dense_tensors(used), device="cpu"), worker, GRADIENTS)
            for parameter, gradient in zip(used, _unflatten_dense_tensors(flat, used), strict=True):
                parameter.grad = gradient.to(parameter.device)

    def beyond(self, version: int) -> int:
        """Updates made since a version, beyond the bound."""
        return 0 if self.rule.bound is None else max(0, self.steps - version - self.rule.bound)

    def apply(self, beyond: int, observe: Observe) -> None:
        """One step from a gradient that is `beyond` updates late."""
        if self.rule.late == "reweighted":
            for group in self.optimizer.param_groups:
                group["lr"] *= self.weight_of(beyond)
        self.show_rate(observe)
        self.step_everything()

    def weight_of(self, beyond: int) -> float:
        """The factor on the learning rate; the schedule sets the rate anew after the step."""
        return 1 / (1 + beyond)

    def pause_workers(self) -> None:
        """Tell every worker that training pauses, and whether its last gradient is still on its way."""
        for worker in self.todo:
            self.send(torch.tensor([HELD if worker in self.computing else STOP]), worker, ANSWERS)

    def show_state(self, observe: Observe, update: int) -> None:
        for name, parameter, place in self.shown():
            show(observe, "weight", name, parameter, update=update, place=place)
        for name, tensor, place in self.optimizer_state():
            show(observe, "state", name, tensor, update=update, place=place)
        observe("step", "step", np.int64(self.steps), update=update, place=Place((), replica=self.ranks.rank))

    # ------------------------------------------------------------------ checkpoints

    def save(self, directory: Path) -> None:
        """Servers write their share, workers their gradient on the way."""
        tensors = self.tensors() | self.state_tensors() if self.serving else self.gradients_on_the_way()
        save_file({n: t.cpu() for n, t in tensors.items()}, directory / f"{self.ranks.rank}.safetensors")
        (directory / f"{self.ranks.rank}.json").write_text(json.dumps(self.trainer_state()))
        dist.barrier()

    def gradients_on_the_way(self) -> Gradients:
        return {} if self.way is None else self.way[2]

    def trainer_state(self) -> dict[str, Any]:
        return {
            "position": self.feed.position,
            "step": self.steps,
            "schedule": self.scheduler.last_epoch,
            "todo": list(self.todo.items()),
            "computing": list(self.computing.items()),
            "way": None if self.way is None else list(self.way[:2]),
        }

    def load(self, directory: Path) -> None:
        tensors = load_file(directory / f"{self.ranks.rank}.safetensors")
        saved = json.loads((directory / f"{self.ranks.rank}.json").read_text())
        if self.serving:
            self.load_weights(tensors)
            self.load_optimizer(tensors)
        self.load_progress(saved, tensors)

    def load_progress(self, saved: dict[str, Any], gradients: Gradients) -> None:
        self.feed.seek(saved["position"])
        self.steps = saved["step"]
        self.load_schedule(saved["schedule"])
        self.todo, self.computing = dict(saved["todo"]), dict(saved["computing"])
        self.resend = saved["way"] is not None
        self.way = (*saved["way"], gradients) if self.resend else None

    def send_again(self, observe: Observe) -> None:
        """After a restore, push the gradient that was on its way when it was saved."""
        if self.resend and self.way is not None:
            window, _, gradients = self.way
            for name, gradient in gradients.items():
                place = Place(tuple(gradient.shape), replica=self.ranks.rank)
                show(observe, "gradient", name, gradient, update=window, place=place)
            self.push(*self.way)
            self.resend = False
