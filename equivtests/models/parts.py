"""Pieces that several models share: the dropout stream, the losses and the transposed weight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivtests.cases import numbers

KEEP = 0.75  # probability that dropout keeps an element

Terms = dict[str, Tensor]
"""Loss terms of one micro-batch as sums, each a scalar: main, extra (tokens), z (rows); or pair embeddings (N, outputs)."""


class DropoutStream:
    """The random state of dropout: decisions are canonical numbers keyed by (draw, site, sample id).

    `draw` is the number of updates made; it is state that a checkpoint has to hold.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = 0

    def mask(self, site: str, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Factors (N, *shape): 0 or 1/KEEP, float64."""
        rows = [numbers.real(self.seed, f"dropout.{site}.{self.draw}.{i}", shape) for i in ids.tolist()]
        drawn = torch.from_numpy(np.array(rows, dtype=np.float64).reshape(len(rows), *shape))
        return (drawn < 2 * KEEP - 1).double() / KEEP


class Dropout(nn.Module):
    """Dropout whose decisions do not depend on the layout."""

    def __init__(self, site: str, stream: DropoutStream) -> None:
        super().__init__()
        self.site, self.stream = site, stream

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = self.stream.mask(self.site, ids, tuple(x.shape[1:]))
        return x * mask.to(dtype=x.dtype, device=x.device)


class Unused(nn.Module):
    """A parameter that no forward pass touches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, width))


def widen(x: Tensor) -> Tensor:
    """At least float32: losses are not added up in a half precision."""
    return x if x.dtype == torch.float64 else x.float()


def squared_error(outputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Sum over valid positions of half the squared error; outputs and targets (N, L, outputs), valid (N, L)."""
    error = (widen(outputs) - targets) * valid.unsqueeze(-1)
    return 0.5 * (error * error).sum()


def cross_entropy(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Sum over valid positions of the token loss; logits (N, L, V), targets and valid (N, L)."""
    losses = F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * valid.flatten()).sum()


def transpose_storage(layer: nn.Linear) -> None:
    """Keep the values' meaning but store the weight column by column (not contiguous)."""
    layer.weight = nn.Parameter(torch.empty_like(layer.weight).t().contiguous().t())
