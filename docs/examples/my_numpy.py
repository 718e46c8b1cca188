"""No torch model at all: a linear layer written in numpy. torch is only the wire that sums arrays over ranks."""

import numpy as np
import torch
import torch.distributed as dist

from equivtests.adapters.adapter import MANDATORY, Adapter, Claims, Strategy
from equivtests.cases.parameters import decays, initial
from equivtests.record.observation import Place


class MyNumpy(Adapter):
    def claims(self):
        strategy = Strategy(
            "my-numpy",
            families=frozenset({"linear"}),
            features=frozenset({"bias"}),
            optimizers=frozenset({"sgd"}),
            observes=MANDATORY | {"tokens", "lr", "step"},
            arithmetic="own",
        )
        return Claims((strategy,), framework=f"numpy {np.__version__}")

    def setup(self, case, ranks):
        self.case, self.ranks, self.steps = case, ranks, 0
        self.dtype = np.dtype(case.precision.weights)
        self.weights = {name: value.astype(self.dtype) for name, value in initial(case).items()}

    def run(self, feed, observe):
        self.show_state(observe, feed.position)
        super().run(feed, observe)  # calls update() for every window

    def update(self, window, observe):
        total = int(self.sum_over_ranks(np.int64(sum(b.tokens for b in window.microbatches))))
        observe("tokens", "tokens", np.int64(total), update=window.update)
        if total > 0:
            loss, gradients = self.accumulate(window, observe, self.case.magnitude / total)
            observe("loss", "loss", loss, update=window.update, place=Place((), partial="sum"))
            gradients = {name: self.sum_over_ranks(gradient) for name, gradient in gradients.items()}
            for name, gradient in gradients.items():
                observe("gradient", name, gradient, update=window.update, place=self.here(gradient))
            self.step(gradients, window.update, observe)
        self.show_state(observe, window.update + 1)

    def accumulate(self, window, observe, factor):
        """This rank's part of loss and gradients: sums over valid tokens, divided by those of the whole window."""
        loss, gradients = 0.0, {name: np.zeros_like(w) for name, w in self.weights.items()}
        for k, batch in enumerate(window.microbatches):
            observe("inputs", "inputs", batch.inputs, update=window.update, microbatch=k)
            x, y = batch.inputs.astype(self.dtype), batch.targets.astype(self.dtype)
            outputs = x @ self.weights["linear.weight"].T + self.weights.get("linear.bias", self.dtype.type(0))
            error = (outputs - y) * batch.valid[..., None]
            loss += factor * 0.5 * float((error * error).sum())
            gradients["linear.weight"] += self.dtype.type(factor) * np.einsum("nlo,nli->oi", error, x)
            if "linear.bias" in gradients:
                gradients["linear.bias"] += self.dtype.type(factor) * error.sum(axis=(0, 1))
        return loss, gradients

    def step(self, gradients, update, observe):
        rate, decay = self.case.optimizer.rate(self.steps), self.case.optimizer.weight_decay
        observe("lr", "lr", np.float64(rate), update=update, place=self.here(np.float64(rate)))
        for name, gradient in gradients.items():
            decayed = gradient + self.dtype.type(decay * decays(self.case, name)) * self.weights[name]
            self.weights[name] = self.weights[name] - self.dtype.type(rate) * decayed
        self.steps += 1

    def show_state(self, observe, update):
        for name, weight in self.weights.items():
            observe("weight", name, weight, update=update, place=self.here(weight))
        observe("step", "step", np.int64(self.steps), update=update, place=self.here(np.int64(0)))

    def here(self, array):
        """The whole array, as the copy that this rank holds."""
        return Place(array.shape, replica=self.ranks.rank)

    def sum_over_ranks(self, array):
        summed = torch.from_numpy(np.array(array))
        dist.all_reduce(summed)
        return summed.numpy()
