"""Pieces that several models share: the dropout stream, the losses and the transposed weight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from equivtests.cases import numbers

KEEP = 0.75  # probability that dropout keeps an element

Terms = dict[str, Tensor]
"""Loss terms of one micro-batch as sums, each a scalar: main, extra (tokens), z, balance (rows). Or pairs: embeddings
(N, outputs)."""


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
    """Dropout whose decisions do not depend on the layout.

    rows: from the number of positions here to (that of the whole sequence, which of them are here); the mask is drawn for
    the whole sequence. watch: called with the site and what each forward pass keeps, bool of the shape of x.
    """

    def __init__(self, site: str, stream: DropoutStream) -> None:
        super().__init__()
        self.site, self.stream = site, stream
        self.rows: Callable[[int], tuple[int, Tensor | slice]] = every_row
        self.watch: Callable[[str, Tensor], None] | None = None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        whole, here = self.rows(x.shape[1])
        mask = self.stream.mask(self.site, ids, (whole, *x.shape[2:]))[:, here]
        if self.watch is not None:
            self.watch(self.site, mask > 0)
        return x * mask.to(dtype=x.dtype, device=x.device)


def every_row(length: int) -> tuple[int, slice]:
    """All positions of a sequence that is here as a whole."""
    return length, slice(None)


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


def transpose_storage(layer: nn.Linear) -> None:
    """Keep the values' meaning but store the weight column by column (not contiguous)."""
    layer.weight = nn.Parameter(torch.empty_like(layer.weight).t().contiguous().t())
