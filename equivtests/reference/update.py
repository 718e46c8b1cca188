"""One update of one device: gradients of a window at given weights, and the step that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from equivtests.cases.case import Case, Semantics
from equivtests.cases.parameters import parameters
from equivtests.reference import optimizers
from equivtests.reference.forward import Sums, Weights, batch_of, row_sums
from equivtests.reference.rows import Rows, row_coefficients, rows_of

EXTRA, Z, PAIRS, BALANCE = 0.25, 2.0**-6, 2.0**-6, 2.0**-3  # factors of the auxiliary terms in the objective
CLIP_EPS = 1e-6

States = dict[str, optimizers.State]


@dataclass
class Gradients:
    """loss: of the window; values: by parameter, absent where no row used it.

    hidden, spread: mean and unbiased variance of the first activations over rows and positions, or None.
    size, power: norms of the means of their absolute values and of their squares: the scales of their rounding.
    routed: by mixture of experts (`layers.0.moe`), the tokens that each expert took, int64 (E,).
    """

    loss: float
    values: Weights
    kink: float = math.inf
    hidden: Tensor | None = None
    spread: Tensor | None = None
    size: float = 0.0
    power: float = 0.0
    routed: dict[str, Tensor] = field(default_factory=dict)

    def toward(self, buffer: str) -> tuple[Tensor | None, float]:
        """(what a running statistic moves towards, or None; the scale of its rounding)."""
        return (self.spread, self.power) if buffer.endswith(".var") else (self.hidden, self.size)


@dataclass
class Split:
    """How the rows are grouped and in which dtypes they are computed and added up. Neutral in exact arithmetic."""

    groups: list[Tensor]
    compute: torch.dtype
    reduce: torch.dtype


def whole(rows: Rows) -> Split:
    """All rows at once, in float64."""
    return Split([torch.arange(len(rows))], torch.float64, torch.float64)


def gradients(
    case: Case,
    semantics: Semantics,
    update: int,
    draw: int,
    weights: Weights,
    split: Split | None = None,
    only_rank: int | None = None,
    backward: Weights | None = None,
) -> Gradients:
    """Loss and gradients of the window of `update` at `weights`, returned in the dtype of the weights.

    `draw`: updates made so far. `only_rank`: W times the part of one rank alone, what it holds before any reduction.
    `backward`: what stands in place of the weights when the backward pass reads them (activations are kept from the forward
    pass, weights are not); None: the same weights.
    """
    rows = rows_of(case, update)
    tokens, auxiliary = row_coefficients(rows, semantics)
    if only_rank is not None:
        mine = (rows.rank == only_rank) * float(case.layout.dp)
        tokens, auxiliary = tokens * mine, auxiliary * mine
    split = split or whole(rows)
    trained = [p.name for p in parameters(case.model) if p.trained]
    total: Weights = {}
    loss, kink, moments = 0.0, math.inf, list[Tensor]()
    routed: dict[str, Tensor] = {}
    if case.model.has("pairs") or case.model.has("batch_norm"):
        split = Split([torch.cat(split.groups)], split.compute, split.reduce)
    for group in split.groups:
        leaves = {n: w.detach().to(split.compute).requires_grad_(n in trained) for n, w in weights.items()}
        if backward is not None:
            leaves = {n: w.detach().clone().requires_grad_(w.requires_grad) for n, w in leaves.items()}
        sums = row_sums(leaves, batch_of(case.model, case.seed, draw, rows, group, split.compute))
        chosen = group.numpy()
        part = objective(case, sums, tokens[chosen], auxiliary[chosen], rows.micro[chosen])
        for name, weight in (backward or {}).items():
            leaves[name].data.copy_(weight)  # past autograd's own check, as a stage that keeps no stash does
        found = torch.autograd.grad(part, [leaves[n] for n in trained], allow_unused=True)
        _accumulate(total, trained, found, split.reduce)
        loss, kink = loss + float(part.detach()), min(kink, sums.kink)
        moments += [] if sums.moments is None else [sums.moments]
        for name, tokens_NE in sums.routed.items():
            routed[name] = routed.get(name, 0) + tokens_NE.sum(dim=0)
    like = next(iter(weights.values())).dtype
    given = Gradients(loss, {n: g.to(like) for n, g in total.items()}, kink, routed=routed)
    _add_statistics(given, moments, len(rows) * case.model.length)
    return given


def outputs_at(case: Case, update: int, draw: int, weights: Weights, dtype: torch.dtype = torch.float64) -> Tensor:
    """What the model gives for each row of the window of `update` at `weights`, (N, L, V), ordered as `rows_of`.

    Positions that a micro-batch with a length of its own does not have are there too, and mean nothing.
    """
    rows = rows_of(case, update)
    cast = {name: weight.detach().to(dtype) for name, weight in weights.items()}
    batch = batch_of(case.model, case.seed, draw, rows, torch.arange(len(rows)), dtype)
    output = row_sums(cast, batch).output
    if output is None:
        raise ValueError(f"case {case.name!r}: what a user's own model gives is not known, only its losses")
    return output.detach()


def _add_statistics(found: Gradients, parts: list[Tensor], count: int) -> None:
    """What running statistics move towards, from the moments (3, N, D) of groups of rows with `count` positions."""
    if parts:
        mean, size, power = torch.cat(parts, dim=1).double().sum(dim=1) / count
        found.hidden, found.size = mean, float(size.norm())
        found.spread, found.power = (power - mean.square()) * (count / (count - 1)), float(power.norm())


def _accumulate(total: Weights, names: list[str], found: tuple[Tensor | None, ...], dtype: torch.dtype) -> None:
    for name, gradient in zip(names, found, strict=True):
        if gradient is not None:
            cast = gradient.to(dtype)
            total[name] = total[name] + cast if name in total else cast


def objective(case: Case, sums: Sums, tokens: np.ndarray, auxiliary: np.ndarray, micro: np.ndarray) -> Tensor:
    """The loss of a group of rows, weighted row by row; `micro`: their micro-batch numbers."""
    main = sums.terms["main"]
    c, a = (torch.as_tensor(x, dtype=main.dtype) for x in (tokens, auxiliary))
    value = (c * main).sum()
    if "extra" in sums.terms:
        value = value + EXTRA * (c * sums.terms["extra"]).sum()
    if "z" in sums.terms:
        value = value + Z * (a * sums.terms["z"]).sum()
    if "balance" in sums.terms:
        value = value + BALANCE * (a * sums.terms["balance"]).sum()
    if sums.pairs is not None:
        value = value + PAIRS * (a[0] * _pairs(sums.pairs, micro))
    return case.magnitude * value


def _pairs(embeddings: Tensor, micro: np.ndarray) -> Tensor:
    """Sum over pairs i != j within each micro-batch number of the product of their embeddings."""
    value = embeddings.new_zeros(())
    for k in sorted(set(micro.tolist())):
        e = embeddings[torch.as_tensor(micro == k)]
        products = e @ e.T
        value = value + products.sum() - products.diagonal().sum()
    return value


def norm(values: Weights, order: str) -> float:
    """Norm of the whole model's gradient, each element once, in float64."""
    if not values:
        return 0.0
    flat = torch.cat([g.double().flatten() for g in values.values()])
    return float(torch.linalg.vector_norm(flat, math.inf if order == "inf" else 2))


def clip_coefficient(case: Case, semantics: Semantics, total: float) -> float:
    """min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ computes it."""
    limit = case.optimizer.clip
    if limit is None or semantics.clip_scope == "none":
        return 1.0
    return min(1.0, limit / (total + CLIP_EPS))


def apply(
    case: Case,
    semantics: Semantics,
    step: int,
    weights: Weights,
    values: Weights,
    coefficient: float,
    states: States,
    rate: float | None = None,
) -> tuple[Weights, States]:
    """Weights and states after one optimizer step from clipped gradients; a parameter without gradient stays.

    With a master copy the step is made in its dtype, and the weights are returned in their own.
    """
    new_weights, new_states = dict(weights), dict(states)
    rate = case.optimizer.rate(step) if rate is None else rate
    for name, gradient in values.items():
        if coefficient != 1.0:
            gradient = gradient * torch.tensor(coefficient, dtype=gradient.dtype)
        weight = weights[name]
        dtype = weight.dtype if semantics.master == "none" else getattr(torch, semantics.master)
        decay = optimizers.decay_of(case.optimizer, name, weight.ndim, semantics.decay)
        stepped, new_states[name] = optimizers.step(
            case.optimizer, rate, decay, weight.to(dtype), gradient.to(dtype), states.get(name, {})
        )
        new_weights[name] = stepped.to(weight.dtype)
    return new_weights, new_states
