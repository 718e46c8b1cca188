"""Tensor parallelism: the last two layers of an MLP, one cut by columns and one by rows, as in Megatron-LM."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.torch_adapter import SHOWN, TorchAdapter
from equivtests.cases.parameters import parameters
from equivtests.record.observation import Place


class Enter(torch.autograd.Function):
    """Into the cut layers: nothing to do. Backward: every rank has the gradient of its part; add them up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """Out of the cut layers: every rank has a part of the sum; add them up. Backward: nothing to do."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Column(nn.Module):
    """Some of the outputs of a linear layer."""

    def __init__(self, layer, part, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(layer.weight.detach()[part].clone())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach()[part].clone())

    def forward(self, x):
        return F.linear(Enter.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer of some of the inputs; the bias is added once, after the sum."""

    def __init__(self, layer, part, group):
        super().__init__()
        self.group, self.bias = group, layer.bias
        self.weight = nn.Parameter(layer.weight.detach()[:, part].clone())

    def forward(self, x):
        y = Leave.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class MyTensorParallel(TorchAdapter):
    def claims(self):
        strategy = Strategy(
            "my-tp",
            axes=frozenset({"dp", "tp"}),
            families=frozenset({"mlp"}),
            features=frozenset({"bias"}),
            uneven=False,  # the tensor ranks must divide the width
            clips=frozenset(),
            observes=SHOWN,
        )
        return Claims((strategy,), framework="my framework 1.0")

    def wrap(self, module):
        """Cut the last two layers, and note which dimension of which parameter is cut."""
        layout, last = self.case.layout, self.case.model.depth - 1
        group = self.ranks.group(layout.partition("tp"))
        size = self.case.model.width // layout.tp
        start = layout.at(self.ranks.rank)["tp"] * size
        self.span = start, start + size
        module.layers[last - 1] = Column(module.layers[last - 1], slice(*self.span), group)
        module.layers[last] = Row(module.layers[last], slice(*self.span), group)
        self.cut = {f"layers.{last - 1}.weight": 0, f"layers.{last - 1}.bias": 0, f"layers.{last}.weight": 1}
        return module

    def shown(self):
        """What this rank holds, and where: the ranks of one tensor-parallel group hold a cut parameter together."""
        rank, layout = self.ranks.rank, self.case.layout
        shapes = {p.name: p.shape for p in parameters(self.case.model)}
        for name, parameter in self.module.named_parameters():
            shape, dim = shapes[name], self.cut.get(name)
            box = None if dim is None else tuple(self.span if d == dim else (0, n) for d, n in enumerate(shape))
            yield name, parameter, Place(shape, box, replica=rank if dim is None else layout.copy(rank, "tp"))

    # Samples differ between data ranks only: over those, tokens are counted, and losses and gradients averaged.

    def averaged(self):
        return self.case.layout.dp

    def data_group(self):
        return self.ranks.group(self.case.layout.partition("dp"))

    def loss_place(self):
        layout = self.case.layout
        return Place((), replica=layout.copy(self.ranks.rank, "dp"), partial="mean", parts=layout.dp)

    def synchronize(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.data_group())
            parameter.grad /= self.averaged()
