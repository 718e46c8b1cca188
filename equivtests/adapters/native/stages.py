"""One stage of a model, as torch.distributed.pipelining takes it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from equivtests.models.staged import Staged

BEGINNING = ("embedding", "positions", "dropout")
"""The parts of a model that only its first stage needs. Those of no layer and not of the beginning belong to its end."""


class Stage(nn.Module):
    """Consecutive layers, the beginning before the first layer, and the end behind the last.

    Its parameters are those of the stage alone, under their canonical names: that is what wrappers see. `terms` are the
    names of the loss terms that the last stage gives, as a tensor (terms,).
    """

    def __init__(self, whole: Staged, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.whole = (whole,)  # in a tuple, so that its other parameters are not this module's
        self.numbers, self.first, self.last = layers, first, last
        self.terms: tuple[str, ...] = ()
        self.given = nn.Identity()  # what the last layer gives passes here
        for name, part in whole.named_children():
            if name == whole.stack:
                self.add_module(name, own_layers(part, layers))
            elif first if name in BEGINNING else last:
                self.add_module(name, part)

    @property
    def layers_here(self) -> list[nn.Module]:
        """What may be wrapped one by one."""
        stack = getattr(self, self.whole[0].stack)
        return list(stack.values()) if isinstance(stack, nn.ModuleDict) else []

    def forward(self, x: Tensor, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor) -> Tensor:
        """From the inputs, or what the stage before gave; rows (N, L, …). The rest is that of the whole micro-batch."""
        whole = self.whole[0]
        if self.first:
            x = whole.begin(x, ids)
        for i in self.numbers:
            x = whole.layer(i, x, inputs)
        if not self.last:
            return x
        terms = whole.end(self.given(x), targets, valid, False)
        self.terms = tuple(terms)
        return torch.stack(list(terms.values()))


def own_layers(stack: nn.Module, layers: range) -> nn.Module:
    """The layers of these numbers, under those numbers."""
    if isinstance(stack, nn.ParameterList):
        return nn.ParameterDict({str(i): stack[i] for i in layers})
    return nn.ModuleDict({str(i): cast(Any, stack)[i] for i in layers})
