"""The models as pure functions of (weights, rows): per-row sums of each loss term.

Written with elementary operations only, apart from `models/`, so that one mistake cannot stand on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equivtests.cases import numbers
from equivtests.cases.case import Model
from equivtests.own import loaded
from equivtests.reference.own import row_losses
from equivtests.reference.rows import Rows

Weights = dict[str, Tensor]


@dataclass
class Batch:
    """Rows as tensors in a working dtype; `draw` numbers the dropout decisions."""

    model: Model
    seed: int
    draw: int
    inputs: Tensor
    targets: Tensor
    valid: Tensor
    ids: list[int]
    conditional: Tensor


@dataclass
class Sums:
    """Per-row sums of loss terms, (N,) each; pairs: (N, D) embeddings or None; kink: least |input of a ReLU|.

    hidden, sizes: (N, D) sums over positions of the first activations and of their absolute values, or None.
    """

    terms: dict[str, Tensor]
    pairs: Tensor | None = None
    hidden: Tensor | None = None
    sizes: Tensor | None = None
    kink: float = math.inf


def batch_of(model: Model, seed: int, draw: int, rows: Rows, chosen: Tensor, dtype: torch.dtype) -> Batch:
    """The chosen rows (int64 indices) in a dtype."""

    def take(array: object) -> Tensor:
        tensor = torch.as_tensor(array)[chosen]
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    ids = rows.ids[chosen.numpy()].tolist()
    return Batch(
        model, seed, draw, take(rows.inputs), take(rows.targets), take(rows.valid), ids, take(rows.conditional)
    )


def row_sums(weights: Weights, batch: Batch) -> Sums:
    """Loss sums of every row."""
    return _FAMILIES[batch.model.family](weights, batch)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _half_square(y: Tensor, batch: Batch) -> Tensor:
    difference = (_wide(y) - _wide(batch.targets)) * batch.valid[:, :, None]
    return difference.square().sum(dim=(1, 2)) / 2


def _chain(w: Weights, batch: Batch) -> Sums:
    y = batch.inputs
    for i in range(batch.model.depth):
        y = y * w[f"factors.{i}"]
    return Sums({"main": _half_square(y, batch)})


def _affine(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _linear(w: Weights, batch: Batch) -> Sums:
    return Sums({"main": _half_square(_affine(w, "linear", batch.inputs), batch)})


def _mlp(w: Weights, batch: Batch) -> Sums:
    x, hidden, sizes, kink = batch.inputs, None, None, math.inf
    for i in range(batch.model.depth):
        x = _affine(w, f"layers.{i}", x)
        if i == 0 and batch.model.has("running"):
            hidden, sizes = x.detach().sum(dim=1), x.detach().abs().sum(dim=1)
        if i < batch.model.depth - 1:
            kink = min(kink, float(x.detach().abs().min())) if x.numel() else kink
            x = x * (x > 0)
        if i == 0 and batch.model.has("dropout"):
            x = x * _dropout(batch, "mlp", x)
    if batch.conditional.any() and batch.model.has("conditional"):
        x = x + (batch.inputs @ w["branch.weight"].T) * batch.conditional[:, None, None]
    pairs = x.sum(dim=1) if batch.model.has("pairs") else None
    return Sums({"main": _half_square(x, batch)}, pairs, hidden, sizes, kink)


def _dropout(batch: Batch, site: str, like: Tensor) -> Tensor:
    """Factors 0 or 4/3: an element is kept if its canonical number lies below 1/2."""
    shape = tuple(like.shape[1:])
    streams = [numbers.real(batch.seed, f"dropout.{site}.{batch.draw}.{i}", shape) for i in batch.ids]
    kept = np.array([(s < 0.5) * (4 / 3) for s in streams]).reshape(like.shape)
    return torch.from_numpy(kept).to(like.dtype)


def _normalize(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    gained = scaled * w[f"{name}.weight"]
    return gained + w[f"{name}.bias"] if f"{name}.bias" in w else gained


def _attention(w: Weights, name: str, x: Tensor) -> Tensor:
    n, length, width = x.shape
    size = width // 2
    q, k, v = (_affine(w, f"{name}.{part}", x).reshape(n, length, -1, size).transpose(1, 2) for part in "qkv")
    if f"{name}.q_norm.weight" in w:
        q, k = _normalize(w, f"{name}.q_norm", q), _normalize(w, f"{name}.k_norm", k)
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    return _affine(w, f"{name}.o", (weights @ v).transpose(1, 2).reshape(n, length, width))


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _token_losses(logits: Tensor, batch: Batch) -> Tensor:
    log_partition = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, batch.targets[:, :, None]).squeeze(-1)
    return ((log_partition - chosen) * batch.valid).sum(dim=1)


def _gpt(w: Weights, batch: Batch) -> Sums:
    model = batch.model
    x = w["embedding.weight"][batch.inputs] + w["positions.weight"][: model.length]
    if model.has("dropout"):
        x = x * _dropout(batch, "gpt", x)
    for i in range(model.depth):
        block = f"layers.{i}"
        x = x + _attention(w, f"{block}.attention", _normalize(w, f"{block}.norm1", x))
        up = _affine(w, f"{block}.mlp.up", _normalize(w, f"{block}.norm2", x))
        x = x + _affine(w, f"{block}.mlp.down", _gelu(up))
    x = _normalize(w, "norm", x)
    if batch.conditional.any() and model.has("conditional"):
        x = x + (x @ w["branch.weight"].T) * batch.conditional[:, None, None]
    logits = _wide(x @ w["embedding.weight" if model.has("tied") else "head.weight"].T)
    terms = {"main": _token_losses(logits, batch)}
    if model.has("extra_head"):
        terms["extra"] = _token_losses(_wide(x @ w["extra_head.weight"].T), batch)
    if model.has("z_loss"):
        terms["z"] = (torch.logsumexp(logits, dim=-1).square() * batch.valid).sum(dim=1)
    return Sums(terms)


def _own(w: Weights, batch: Batch) -> Sums:
    """Discontinuities of a user's own module are not known: `kink` says nothing."""
    return Sums({"main": row_losses(loaded(batch.model.own), w, batch.inputs, batch.targets, batch.valid)})


_FAMILIES = {"chain": _chain, "linear": _linear, "mlp": _mlp, "gpt": _gpt, "own": _own}
