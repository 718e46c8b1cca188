"""DTensors carry their place: an adapter around fully_shard shows them as they are."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.torch_adapter import TorchAdapter


class MyFSDP(TorchAdapter):
    def claims(self):
        return Claims((Strategy("my-fsdp"),), framework=f"torch {torch.__version__}")

    def wrap(self, module):
        return fully_shard(module, mesh=self.ranks.mesh((self.ranks.world,), ("shard",)))

    def shown(self):
        """None as place: a DTensor knows its own."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter, None

    def gradient_norm(self, order):
        norm = super().gradient_norm(order)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
