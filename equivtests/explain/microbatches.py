"""Which micro-batches a wrong gradient is made of, and whose targets a wrong loss was computed with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from equivtests.explain.factors import named_factor
from equivtests.explain.parts import close, coefficients, of_rows
from equivtests.judge.check import Check
from equivtests.judge.checks import number, truth_at
from equivtests.judge.truth import seen_by
from equivtests.judge.view import View
from equivtests.reference import update as one
from equivtests.reference.forward import batch_of, row_sums
from equivtests.reference.rows import Rows, rows_of

Lines = Iterator[str]

MOST = 12  # micro-batches that are told apart
FIT = 1e-4  # relative miss of a gradient that is put together from its micro-batches
PLAIN = 1e-3  # how far a factor may be from the one that is named


def factors_of_microbatches(view: View, check: Check) -> Lines:
    """Is the gradient right but for how often each micro-batch counts?"""
    rows, whole = rows_of(view.case, check.update), view.whole("gradient", check.name, check.update)
    numbers = sorted(set(rows.micro.tolist()))
    if whole is None or whole.problem or not 1 < len(numbers) <= MOST:
        return
    parts = [of_rows(view, check.update, rows.micro == k)[check.name] / view.case.layout.dp for k in numbers]
    factors = fitted(whole.values.astype(np.float64), parts)
    if factors is None or np.ptp(factors) <= PLAIN:
        return
    missing = [k for k, f in zip(numbers, factors, strict=True) if abs(f) <= PLAIN]
    if len(missing) + sum(abs(factors - 1) <= PLAIN) == len(numbers):
        yield f"micro-batches {listed(missing)} are missing from the gradient of {check.name}; all others count once"
        return
    told = (f"{k}: {f:.4g}{named_factor(view.case, check.update, f)}" for k, f in zip(numbers, factors, strict=True))
    yield f"in the gradient of {check.name}, micro-batches count with these factors: {'; '.join(told)}"


def fitted(observed: np.ndarray, parts: list[np.ndarray]) -> np.ndarray | None:
    """The factors with which parts add up to what was observed, or None if they do not, or not in one way."""
    matrix = np.stack([part.reshape(-1) for part in parts], axis=1)
    if observed.size != len(matrix) or not np.isfinite(observed).all() or np.linalg.matrix_rank(matrix) < len(parts):
        return None
    factors = np.linalg.lstsq(matrix, observed.reshape(-1), rcond=None)[0]
    miss = np.linalg.norm(matrix @ factors - observed.reshape(-1))
    return factors if miss <= FIT * np.linalg.norm(observed) else None


def wrong_stages(view: View, check: Check) -> Lines:
    """On which pipeline ranks are gradients wrong, if they are right on others?"""
    if view.case.layout.pp == 1:
        return
    truth, at = truth_at(view, check.update).values, view.case.layout.at
    wrong, right = set[int](), set[int]()
    for name, gradient in truth.items():
        whole, shown = view.whole("gradient", name, check.update), view.parts.get(("gradient", check.update), {})
        fits = whole is not None and not whole.problem and close(whole.values, gradient.numpy(), view)
        (right if fits else wrong).update(at(o.rank)["pp"] for o in shown.get(name, []))
    if right - wrong and wrong:
        yield f"gradients are wrong on pipeline rank {listed(sorted(wrong))}, right on {listed(sorted(right - wrong))}"


def targets_of_another(view: View, check: Check) -> Lines:
    """Is the loss that of outputs paired with the targets of another micro-batch?"""
    shown = number(view, "loss", check.update)
    truth = truth_at(view, check.update).loss
    for shift, word in ((1, "next"), (-1, "previous")):
        rows = shifted(rows_of(view.case, check.update), shift)
        if shown is not None and rows is not None:
            loss = loss_of(view, check.update, rows)
            if abs(loss - shown) <= FIT * abs(shown) and abs(loss - truth) > 10 * FIT * abs(truth):
                yield f"the loss is that of outputs paired with the targets of the {word} micro-batch, on the last stage"


def shifted(rows: Rows, shift: int) -> Rows | None:
    """The rows with the targets, and their validity, of another micro-batch of the same rank; None if sizes differ."""
    order = np.arange(len(rows))
    for rank in sorted(set(rows.rank.tolist())):
        blocks = [np.flatnonzero((rows.rank == rank) & (rows.micro == k)) for k in range(rows.microbatches[rank])]
        if len({len(block) for block in blocks}) > 1:
            return None
        for k, block in enumerate(blocks):
            order[block] = blocks[(k + shift) % len(blocks)]
    return dataclasses.replace(rows, targets=rows.targets[order], valid=rows.valid[order])


def loss_of(view: View, update: int, rows: Rows) -> float:
    """The loss of rows at the observed weights, with the factors of the window."""
    case, draw = view.case, view.expectation.steps[update].steps
    weights = {n: w.double() for n, w in seen_by(view, update).forward.items()}
    batch = batch_of(case.model, case.seed, draw, rows, torch.arange(len(rows)), torch.float64)
    with torch.no_grad():
        return float(one.objective(case, row_sums(weights, batch), *coefficients(view, update), rows.micro))


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
