"""Flat pieces: every rank keeps an interval of each flattened parameter, and whole ones only during an update."""

import torch
import torch.distributed as dist
from torch import nn

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.torch_adapter import TorchAdapter
from equivtests.record.observation import Place


class MyFlatShards(TorchAdapter):
    def claims(self):
        return Claims((Strategy("my-flat-shards"),), framework="my framework 1.0")

    def wrap(self, module):
        self.shards = {n: nn.Parameter(self.cut(p), p.requires_grad) for n, p in module.named_parameters()}
        return module

    def interval(self, parameter):
        """(start, stop) of this rank in the flattened parameter; the last ranks may have less, or nothing."""
        size = -(-parameter.numel() // self.ranks.world)
        return min(self.ranks.rank * size, parameter.numel()), min((self.ranks.rank + 1) * size, parameter.numel())

    def cut(self, tensor):
        return tensor.detach().flatten()[slice(*self.interval(tensor))].clone()

    def shown(self):
        for name, parameter in self.module.named_parameters():
            yield name, self.shards[name], Place(tuple(parameter.shape), interval=self.interval(parameter))

    def synchronize(self):
        """Average the whole gradients, keep this rank's pieces."""
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                self.shards[name].grad = self.cut(parameter.grad / self.ranks.world)
                parameter.grad = None

    def gradient_norm(self, order):
        """Each element lies on one rank, so norms of the ranks combine to the norm of the model."""
        local = super().gradient_norm(order)
        norms = [torch.empty_like(local) for _ in range(self.ranks.world)]
        dist.all_gather(norms, local)
        return torch.linalg.vector_norm(torch.stack(norms), order)

    def optimizer_step(self):
        super().optimizer_step()
        for name, parameter in self.module.named_parameters():
            pieces = [None] * self.ranks.world
            dist.all_gather_object(pieces, self.shards[name].detach())
            parameter.data.copy_(torch.cat(pieces).view_as(parameter))
