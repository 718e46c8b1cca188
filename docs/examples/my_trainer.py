"""A framework that owns its loop: it is handed data and calls back. The adapter overrides run()."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from equivtests.adapters.adapter import Adapter, Claims, Strategy
from equivtests.adapters.places import show
from equivtests.models.build import build
from equivtests.record.observation import Place


class Trainer:
    """The framework: fit() trains until the data ends, and can be initialized once per process."""

    started = False

    def __init__(self, module, lr, callback):
        if Trainer.started:
            raise RuntimeError("Trainer was already initialized in this process")
        Trainer.started = True
        self.model, self.callback, self.step = DistributedDataParallel(module), callback, 0
        self.optimizer = torch.optim.SGD(module.parameters(), lr=lr)

    def fit(self, batches, loss_of):
        for batch in batches:
            loss = loss_of(self.model, batch)
            loss.backward()
            self.callback.on_gradients(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.callback.on_step_end()


class MyTrainer(Adapter):
    def claims(self):
        strategy = Strategy(
            "my-trainer",
            families=frozenset({"linear", "mlp", "gpt"}),
            features=frozenset({"bias"}),
            optimizers=frozenset({"sgd"}),
            ragged=False,
        )
        return Claims((strategy,), isolation="case", framework="my trainer 1.0")

    def setup(self, case, ranks):
        self.case, self.ranks = case, ranks
        self.module, _ = build(case, ranks.device)
        self.module.register_forward_pre_hook(lambda _, arguments: self.fed.append(arguments[0].detach().cpu()))
        self.fed = []
        self.trainer = Trainer(self.module, case.optimizer.lr, self)

    def run(self, feed, observe):
        """The trainer pulls windows from the feed; what it shows, it shows from its callbacks."""
        self.observe = observe
        self.show_weights(feed.position)
        self.trainer.fit(feed, self.loss_of)

    def loss_of(self, model, window):
        """W times this rank's part of the window's loss: DDP averages over ranks, which makes it whole."""
        self.update = window.update
        tokens = torch.tensor(sum(b.tokens for b in window.microbatches), device=self.ranks.device)
        dist.all_reduce(tokens)
        terms = [model(*self.tensors(b), b.conditional)["main"] for b in window.microbatches]
        return self.case.magnitude * self.ranks.world * torch.stack(terms).sum() / tokens

    def tensors(self, batch):
        dtype = getattr(torch, self.case.precision.weights)
        for array in (batch.inputs, batch.targets, batch.valid, batch.ids):
            tensor = torch.from_numpy(array).to(self.ranks.device)
            yield tensor.to(dtype) if tensor.is_floating_point() else tensor

    def on_gradients(self, loss):
        for k, inputs in enumerate(self.fed):
            show(self.observe, "inputs", "inputs", inputs, update=self.update, microbatch=k)
        self.fed.clear()
        self.observe("loss", "loss", loss.detach().cpu().numpy(), update=self.update, place=Place((), partial="mean"))
        for name, parameter in self.module.named_parameters():
            show(self.observe, "gradient", name, parameter.grad, update=self.update, replica=self.ranks.rank)

    def on_step_end(self):
        self.show_weights(self.update + 1)

    def show_weights(self, update):
        for name, parameter in self.module.named_parameters():
            show(self.observe, "weight", name, parameter, update=update, replica=self.ranks.rank)
