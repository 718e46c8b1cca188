"""Parts of the reference gradient: of one rank, of some micro-batches, of one loss term, of pairs within ranks."""

from __future__ import annotations

import math

import numpy as np
import torch

from equivtests.judge.truth import seen_by
from equivtests.judge.view import View
from equivtests.reference import update as one
from equivtests.reference.expectation import trained_names
from equivtests.reference.forward import Sums, batch_of, row_sums
from equivtests.reference.rows import Rows, row_coefficients, rows_of

Arrays = dict[str, np.ndarray]

CLOSE = 256
"""How many units of rounding an explanation may miss by: it names, it does not judge."""


def coefficients(view: View, update: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors on token-averaged and on row-averaged terms, as the case demands them."""
    return row_coefficients(rows_of(view.case, update), view.expectation.semantics)


def part(
    view: View,
    update: int,
    tokens: np.ndarray,
    auxiliary: np.ndarray,
    term: str = "",
    micro: np.ndarray | None = None,
) -> Arrays:
    """Gradients at the observed weights with factors (N,) of the caller's own, of one loss term or ("") of all."""
    case, rows = view.case, rows_of(view.case, update)
    trained = trained_names(case)
    leaves = {n: w.double().requires_grad_(n in trained) for n, w in seen_by(view, update).forward.items()}
    everything = torch.arange(len(rows))
    draw = view.expectation.steps[update].steps
    sums = row_sums(leaves, batch_of(case.model, case.seed, draw, rows, everything, torch.float64))
    value = one.objective(case, only(sums, term), tokens, auxiliary, rows.micro if micro is None else micro)
    found = torch.autograd.grad(value, [leaves[n] for n in trained], allow_unused=True)
    return {n: np.zeros(leaves[n].shape) if g is None else g.numpy() for n, g in zip(trained, found, strict=True)}


def only(sums: Sums, term: str) -> Sums:
    """The sums with every loss term but one left out ("": none is)."""
    if not term:
        return sums
    terms = {name: value if name == term else value * 0 for name, value in sums.terms.items()}
    return Sums(terms, sums.pairs if term == "pairs" else None)


def of_rows(view: View, update: int, chosen: np.ndarray) -> Arrays:
    """W times the part of the chosen rows (N,): what a rank holds of its own before any reduction."""
    factors = chosen * float(view.case.layout.dp)
    tokens, auxiliary = coefficients(view, update)
    return part(view, update, tokens * factors, auxiliary * factors)


def of_term(view: View, update: int, term: str) -> Arrays:
    return part(view, update, *coefficients(view, update), term)


def across_ranks(view: View, update: int) -> Arrays:
    """The part of the loss over pairs whose samples lie on different ranks."""
    rows = rows_of(view.case, update)
    apart = rows.micro * view.case.layout.dp + rows.rank
    whole = of_term(view, update, "pairs")
    within = part(view, update, *coefficients(view, update), "pairs", apart)
    return {n: g - within[n] for n, g in whole.items()}


def hidden_mean(view: View, update: int, rows: Rows, chosen: np.ndarray) -> np.ndarray | None:
    """Mean hidden activation of the chosen rows (bool (N,)), or None if there is none."""
    leaves = {n: w.double() for n, w in seen_by(view, update).forward.items()}
    index = torch.from_numpy(np.flatnonzero(chosen))
    draw = view.expectation.steps[update].steps
    batch = batch_of(view.case.model, view.case.seed, draw, rows, index, torch.float64)
    hidden = row_sums(leaves, batch).hidden if len(index) else None
    return None if hidden is None else (hidden.sum(dim=0) / (len(index) * view.case.model.length)).numpy()


def observed(view: View, update: int) -> Arrays:
    """The gradients that were shown (the first copy of each)."""
    return {n: w.double().numpy() for n, w in view.tensors("gradient", update).items()}


def flat(arrays: Arrays, names: list[str]) -> np.ndarray:
    return np.concatenate([arrays[n].reshape(-1) for n in names]) if names else np.zeros(0)


def multiple(view: View, left: np.ndarray, right: np.ndarray, scale: float) -> float | None:
    """The factor f with left = f · right up to rounding of numbers of size `scale`, or None."""
    power = float(right @ right)
    if power == 0 or not np.isfinite(left).all():
        return None
    factor = float(left @ right) / power
    miss = float(np.linalg.norm(left - factor * right))
    signal = math.sqrt(power) * max(1.0, abs(factor))
    return factor if miss <= CLOSE * view.gradient_unit * scale and miss <= signal / 16 else None


def close(value: np.ndarray, truth: np.ndarray, view: View) -> bool:
    """Equal up to rounding, with room for a few ill-conditioned elements."""
    if value.shape != truth.shape:
        return False
    norm = float(np.linalg.norm(truth))
    return bool(np.linalg.norm(value - truth) <= 64 * view.gradient_unit * max(norm, 1e-30))
