"""The models as pure functions of (weights, rows): per-row sums of each loss term.

Written with elementary operations only, apart from `models/`, so that one mistake cannot stand on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from equivtests.cases import numbers
from equivtests.cases.case import Case, Model
from equivtests.own import loaded
from equivtests.reference.own import row_losses
from equivtests.reference.rows import Rows, rows_of

Weights = dict[str, Tensor]

SMOOTHING = 0.125  # weight of the mean over the vocabulary in a smoothed target


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
    micro: Tensor


@dataclass
class Sums:
    """Per-row sums of loss terms, (N,) each; pairs: (N, D) embeddings or None.

    output: what the model gives, (N, L, V) logits or (N, L, outputs); None for a user's own model.
    kink: how near any branch is: least |input of a ReLU|, least lead of the last chosen expert's probability over the next.
    routed: by mixture of experts (`layers.0.moe`), the tokens of each row that each expert took, int64 (N, E).
    moments: (3, N, D) sums over positions of the first activations, of their absolute values and of their squares, or None.
    """

    terms: dict[str, Tensor]
    pairs: Tensor | None = None
    moments: Tensor | None = None
    kink: float = math.inf
    output: Tensor | None = None
    routed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def hidden(self) -> Tensor | None:
        """(N, D) sums over positions of the first activations, or None."""
        return None if self.moments is None else self.moments[0]


def batch_of(model: Model, seed: int, draw: int, rows: Rows, chosen: Tensor, dtype: torch.dtype) -> Batch:
    """The chosen rows (int64 indices) in a dtype."""

    def take(array: object) -> Tensor:
        tensor = torch.as_tensor(array)[chosen]
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    ids = rows.ids[chosen.numpy()].tolist()
    inputs, targets, valid = (take(array) for array in (rows.inputs, rows.targets, rows.valid))
    return Batch(model, seed, draw, inputs, targets, valid, ids, take(rows.conditional), take(rows.micro))


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
    return Sums({"main": _half_square(y, batch)}, output=y)


def _affine(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _linear(w: Weights, batch: Batch) -> Sums:
    y = _affine(w, "linear", batch.inputs)
    return Sums({"main": _half_square(y, batch)}, output=y)


def _gated_mlp(w: Weights, batch: Batch) -> Sums:
    y = _gated(w, "", batch.inputs)
    return Sums({"main": _half_square(y, batch)}, output=y)


def _gated(w: Weights, prefix: str, x: Tensor) -> Tensor:
    gate = _affine(w, f"{prefix}gate", x)
    return _affine(w, f"{prefix}down", gate * torch.sigmoid(gate) * _affine(w, f"{prefix}up", x))


def _mlp(w: Weights, batch: Batch) -> Sums:
    x, sums, kink = batch.inputs, Sums({}), math.inf
    for i in range(batch.model.depth):
        x = _affine(w, f"layers.{i}", x)
        if i == 0 and batch.model.keeps_statistics:
            sums.moments = torch.stack([y.detach().sum(dim=1) for y in (x, x.abs(), x.square())])
        if i == 0 and batch.model.has("batch_norm"):
            x = _standardized(_wide(x), batch.micro).to(x.dtype)
        if i < batch.model.depth - 1:
            kink = min(kink, float(x.detach().abs().min())) if x.numel() else kink
            x = x * (x > 0)
        if i == 0 and batch.model.has("dropout"):
            x = x * _dropout(batch, "mlp", x)
    if batch.conditional.any() and batch.model.has("conditional"):
        x = x + (batch.inputs @ w["branch.weight"].T) * batch.conditional[:, None, None]
    sums.terms, sums.kink, sums.output = {"main": _half_square(x, batch)}, kink, x
    sums.pairs = x.sum(dim=1) if batch.model.has("pairs") else None
    return sums


def _standardized(x: Tensor, micro: Tensor) -> Tensor:
    """Deviations from the mean of all rows and positions of the same micro-batch number, over √(variance + 1/64)."""
    y = torch.empty_like(x)
    for k in micro.unique().tolist():
        rows = x[micro == k]
        deviation = rows - rows.mean(dim=(0, 1))
        y = y.index_put((micro == k,), deviation * (deviation.square().mean(dim=(0, 1)) + 1 / 64).rsqrt())
    return y


def _dropout(batch: Batch, site: str, like: Tensor) -> Tensor:
    """Factors 0 or 4/3: an element is kept if its canonical number lies below 1/2."""
    shape = tuple(like.shape[1:])
    streams = [numbers.real(batch.seed, f"dropout.{site}.{batch.draw}.{i}", shape) for i in batch.ids]
    kept = np.array([(s < 0.5) * (4 / 3) for s in streams]).reshape(like.shape)
    return torch.from_numpy(kept).to(like.dtype)


def dropout_masks(case: Case, update: int, draw: int) -> dict[str, np.ndarray]:
    """Which elements dropout keeps, bool (N, L, D), in the order of `rows_of`, by site; `draw`: updates made so far."""
    model, rows = case.model, rows_of(case, update)
    if not model.has("dropout"):
        return {}
    features = model.outputs if model.family == "mlp" and model.depth == 1 else model.width
    shape = (model.length, features)
    drawn = [numbers.real(case.seed, f"dropout.{model.family}.{draw}.{i}", shape) for i in rows.ids.tolist()]
    return {model.family: np.array(drawn).reshape(-1, *shape) < 0.5}


def _normalize(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    gained = scaled * w[f"{name}.weight"]
    return gained + w[f"{name}.bias"] if f"{name}.bias" in w else gained


def _attention(w: Weights, name: str, x: Tensor, heads: int, hidden: Tensor) -> Tensor:
    """hidden: bool (L, L) or (N, 1, L, L), which positions (columns) a position must not see."""
    n, length, width = x.shape
    size = width // heads
    q, k, v = (_affine(w, f"{name}.{part}", x).reshape(n, length, -1, size).transpose(1, 2) for part in "qkv")
    if f"{name}.q_norm.weight" in w:
        q, k = _normalize(w, f"{name}.q_norm", q), _normalize(w, f"{name}.k_norm", k)
    if 1 < k.shape[1] < heads:  # groups of neighbouring query heads
        k, v = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return _affine(w, f"{name}.o", (weights @ v).transpose(1, 2).reshape(n, length, width))


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _token_losses(logits: Tensor, batch: Batch) -> Tensor:
    log_partition = torch.logsumexp(logits, dim=-1)
    expected = logits.gather(-1, batch.targets[:, :, None]).squeeze(-1)
    if batch.model.has("smoothing"):
        expected = (1 - SMOOTHING) * expected + SMOOTHING * logits.mean(dim=-1)
    return ((log_partition - expected) * batch.valid).sum(dim=1)


def _documents(tokens: list[int]) -> tuple[list[int], list[int]]:
    """(number of the document, position in it) of every token of a packed row: token 0 is the last of its document."""
    number, place, found = 0, 0, []
    for token in tokens:
        found.append((number, place))
        number, place = (number + 1, 0) if token == 0 else (number, place + 1)
    return [n for n, _ in found], [p for _, p in found]


def _layout_of_rows(batch: Batch) -> tuple[Tensor | slice, Tensor]:
    """(index of every token's position embedding, what no position may see as in `_attention`)."""
    length = batch.model.length
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    if not batch.model.has("packed"):
        return slice(length), later
    rows = [_documents(row) for row in batch.inputs.tolist()]
    documents, places = (torch.tensor([row[i] for row in rows], dtype=torch.int64).reshape(-1, length) for i in (0, 1))
    elsewhere = documents[:, :, None] != documents[:, None, :]
    return places, (later | elsewhere)[:, None]


def _feedforward(w: Weights, prefix: str, x: Tensor) -> Tensor:
    if f"{prefix}gate.weight" in w:
        return _gated(w, prefix, x)
    return _affine(w, f"{prefix}down", _gelu(_affine(w, f"{prefix}up", x)))


def _gpt(w: Weights, batch: Batch) -> Sums:
    model, sums = batch.model, Sums({})
    places, hidden = _layout_of_rows(batch)
    x = w["embedding.weight"][batch.inputs] + w["positions.weight"][places]
    if model.has("dropout"):
        x = x * _dropout(batch, model.family, x)
    for i in range(model.depth):
        block = f"layers.{i}"
        x = x + _attention(w, f"{block}.attention", _normalize(w, f"{block}.norm1", x), model.heads, hidden)
        x = x + _fed(w, block, _normalize(w, f"{block}.norm2", x), model, sums)
    x = _normalize(w, "norm", x)
    if batch.conditional.any() and model.has("conditional"):
        x = x + (x @ w["branch.weight"].T) * batch.conditional[:, None, None]
    logits = _wide(x @ w["embedding.weight" if model.has("tied") else "head.weight"].T)
    sums.output, sums.terms["main"] = logits, _token_losses(logits, batch)
    if model.has("extra_head"):
        sums.terms["extra"] = _token_losses(_wide(x @ w["extra_head.weight"].T), batch)
    if model.has("z_loss"):
        sums.terms["z"] = (torch.logsumexp(logits, dim=-1).square() * batch.valid).sum(dim=1)
    return sums


def _fed(w: Weights, block: str, x: Tensor, model: Model, sums: Sums) -> Tensor:
    """What the feedforward of a block adds: one for all tokens, or those of the experts that a router chooses."""
    if not model.experts:
        return _feedforward(w, f"{block}.mlp.", x)
    name = f"{block}.moe"
    probability = _wide(x @ w[f"{name}.router.weight"].T).softmax(dim=-1)
    wanted, lead = _choices(probability.detach(), model.top_k)
    taken = wanted & (wanted.cumsum(dim=1) <= model.capacity) if model.capacity else wanted
    sums.kink, sums.routed[name] = min(sums.kink, lead), taken.sum(dim=1)
    if model.has("balance"):
        term = model.experts * (wanted.to(x.dtype).mean(dim=1) / model.top_k * probability.mean(dim=1)).sum(dim=1)
        sums.terms["balance"] = sums.terms.get("balance", 0) + term
    given = torch.stack([_feedforward(w, f"{name}.experts.{e}.", x) for e in range(model.experts)], dim=2)
    return ((probability * taken).to(x.dtype)[..., None] * given).sum(dim=2)


def _choices(probability: Tensor, top_k: int) -> tuple[Tensor, float]:
    """(the top_k most probable experts of every token as bool (N, L, E), least lead of the last of them over the next)."""
    ordered = probability.sort(dim=-1, descending=True).values
    if top_k == probability.shape[-1]:
        return torch.ones_like(probability, dtype=torch.bool), math.inf
    last, following = ordered[..., top_k - 1], ordered[..., top_k]
    lead = float((last - following).min()) if probability.numel() else math.inf
    return probability >= last[..., None], lead


def _own(w: Weights, batch: Batch) -> Sums:
    """Discontinuities of a user's own module are not known: `kink` says nothing."""
    return Sums({"main": row_losses(loaded(batch.model.own), w, batch.inputs, batch.targets, batch.valid)})


_FAMILIES = {
    "chain": _chain,
    "linear": _linear,
    "mlp": _mlp,
    "gated_mlp": _gated_mlp,
    "gpt": _gpt,
    "moe": _gpt,
    "own": _own,
}
