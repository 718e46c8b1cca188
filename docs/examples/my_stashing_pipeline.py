"""An asynchronous pipeline: 1F1B that is never flushed, in which every stage stashes weights, as in PipeDream."""

import copy
from collections import deque

import numpy as np
import torch
import torch.distributed as dist

from equivtests.adapters.adapter import MANDATORY, Claims, Strategy
from equivtests.adapters.torch_adapter import TorchAdapter
from equivtests.cases.case import Semantics
from equivtests.cases.staleness import Staleness
from equivtests.record.observation import Place

FORWARD, BACKWARD = 0, 1


class MyPipeline(TorchAdapter):
    def claims(self):
        strategy = Strategy(
            "my-stashing",
            axes=frozenset({"pp"}),
            asynchronous="pipeline",
            schedule="1f1b",
            microbatches="one",  # every micro-batch makes an update
            semantics=Semantics(staleness=Staleness(versions="stashing")),
            families=frozenset({"chain", "mlp"}),
            features=frozenset({"bias"}),
            clips=frozenset(),
            observes=MANDATORY | {"tokens", "lr", "state", "step", "timeline", "live"},
        )
        return Claims((strategy,), framework="my framework 1.0")

    def wrap(self, module):
        """This rank is one stage, which has some of the layers."""
        layout = self.case.layout
        self.stage, self.last = layout.at(self.ranks.rank)["pp"], layout.pp - 1
        self.layers = layout.layers_of(self.case.model.depth)[self.stage]
        return module

    def shown(self):
        for name, parameter in self.module.named_parameters():
            if int(name.split(".")[1]) in self.layers:  # layers.0.weight, factors.0
                yield name, parameter, Place(tuple(parameter.shape))

    def counters(self):
        return {"step": self.steps}

    def run(self, feed, observe):
        """Forward passes of stage s are P - 1 - s mini-batches ahead of its backward passes, until the feed ends."""
        self.observe, self.flying, self.sent, self.ran, self.live = observe, deque(), [], [], 1
        self.show_state(observe, feed.position)
        for window in feed:
            self.forward_pass(window)
            if len(self.flying) > self.last - self.stage:
                self.backward_pass()
        while self.flying:
            self.backward_pass()
        for request in self.sent:
            request.wait()

    def forward_pass(self, window):
        (batch,) = window.microbatches
        stash = copy.deepcopy(self.module)  # these weights, for the backward pass too
        inputs = self.to_device(batch.inputs)
        entered = inputs if self.stage == 0 else self.receive(self.stage - 1, batch).requires_grad_()
        x = entered
        for i in self.layers:
            x = stash.layer(i, x, inputs)
        if self.stage == 0:
            self.observe("inputs", "inputs", entered.numpy(), update=window.update, microbatch=0)
        if self.stage < self.last:
            self.sent.append(dist.isend(x.detach(), self.stage + 1))
        else:
            summed = stash.end(x, self.to_device(batch.targets), self.to_device(batch.valid), False)["main"]
            x = self.case.magnitude * summed / batch.tokens
            self.observe("loss", "loss", x.detach().numpy(), update=window.update)
        self.flying.append((window, stash, self.steps, entered, x))
        self.ran.append((FORWARD, self.stage, window.update, self.steps))
        self.live = max(self.live, len({version for _, _, version, _, _ in self.flying} | {self.steps}))

    def backward_pass(self):
        self.window, stash, version, entered, x = self.flying.popleft()
        update, batch = self.window.update, self.window.microbatches[0]
        x.backward(None if self.stage == self.last else self.receive(self.stage + 1, batch))
        if self.stage > 0:
            self.sent.append(dist.isend(entered.grad, self.stage - 1))
        for name, parameter, place in self.shown():
            parameter.grad = stash.get_parameter(name).grad
            self.observe("gradient", name, parameter.grad.numpy(), update=update, place=place)
        self.observe("tokens", "tokens", np.int64(batch.tokens), update=update)
        self.advance(self.observe)  # the optimizer's step
        self.ran.append((BACKWARD, self.stage, update, version))
        self.observe("timeline", "timeline", np.array(self.ran), update=update)
        self.observe("live", "live", np.int64(self.live), update=update)
        self.ran, self.live = [], 1
        self.show_state(self.observe, update + 1)

    def receive(self, stage, batch):
        """What passes between two stages in either direction: (rows, positions, width)."""
        width = 1 if self.case.model.family == "chain" else self.case.model.width
        tensor = torch.empty(*batch.valid.shape, width, dtype=self.dtype)
        dist.recv(tensor, stage)
        return tensor
