"""My framework behind equivtests: data parallelism, gradients averaged parameter by parameter."""

import torch
import torch.distributed as dist

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.torch_adapter import SHOWN, TorchAdapter


class MyFramework(TorchAdapter):
    def claims(self):
        strategy = Strategy(
            "my-dp",
            observes=SHOWN,
            algorithm="all-reduce",
            restores=True,
        )
        return Claims((strategy,), framework="my framework 1.0")

    def synchronize(self):
        """After the last backward pass: make this rank's gradients those of the whole window."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.ranks.world

    def save_tensors(self, directory):
        if self.ranks.rank == 0:
            torch.save([self.module.state_dict(), self.optimizer.state_dict()], directory / "state.pt")

    def load_tensors(self, directory):
        model, optimizer = torch.load(directory / "state.pt", weights_only=True)
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
