"""All rows of one window, over all ranks and micro-batches, with where each was fed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equivtests.cases.case import Case, Semantics
from equivtests.cases.windows import empty_micro_batch, window_of


@dataclass(frozen=True)
class Rows:
    """N rows: inputs, targets, valid (N, L, …); ids, rank, micro (N,) int64; conditional (N,) bool; tokens (N,) int64.

    All rows have L = model.length positions. Those of a shorter micro-batch are filled up with token 0, which is not valid.
    `microbatches[r]`: how many micro-batches rank r fed.
    """

    inputs: np.ndarray
    targets: np.ndarray
    valid: np.ndarray
    ids: np.ndarray
    rank: np.ndarray
    micro: np.ndarray
    conditional: np.ndarray
    microbatches: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> np.ndarray:
        return self.valid.sum(axis=1)


@lru_cache(maxsize=256)
def rows_of(case: Case, update: int) -> Rows:
    """The window of `update` as one table, in (rank, micro-batch, row) order."""
    windows = [window_of(case, update, rank) for rank in range(case.layout.dp)]
    counts = tuple(len(micros) for micros in case.feeding(update))
    fed = [(r, k, b) for r, w in enumerate(windows) for k, b in enumerate(w.microbatches[: counts[r]])]
    fed = fed or [(0, 0, empty_micro_batch(case))]

    def column(values: list[tuple[int, int]], dtype: type) -> np.ndarray:
        return np.concatenate([np.full(n, v, dtype=dtype) for v, n in values])

    return Rows(
        inputs=np.concatenate([_filled(case, b.inputs) for _, _, b in fed]),
        targets=np.concatenate([_filled(case, b.targets) for _, _, b in fed]),
        valid=np.concatenate([_filled(case, b.valid) for _, _, b in fed]),
        ids=np.concatenate([b.ids for _, _, b in fed]),
        rank=column([(r, b.rows) for r, _, b in fed], np.int64),
        micro=column([(k, b.rows) for _, k, b in fed], np.int64),
        conditional=column([(b.conditional, b.rows) for _, _, b in fed], bool),
        microbatches=counts,
    )


def _filled(case: Case, rows: np.ndarray) -> np.ndarray:
    """Rows (N, length) of a micro-batch with a length of its own as (N, model.length)."""
    return np.pad(rows, ((0, 0), (0, case.model.length - rows.shape[1]))) if case.lengths else rows


def token_coefficients(rows: Rows, span: str) -> np.ndarray:
    """Factor on each row's summed token loss, float64 (N,), so that the sum over rows is the window's loss."""
    world, n = len(rows.microbatches), rows.tokens
    ones = np.ones(len(rows))
    if span == "window":
        return ones / n.sum()
    if span == "microbatch":
        return _inverse(_sums(n, rows.micro)) / max(rows.microbatches)
    if span == "rank":
        return _inverse(_sums(n, rows.rank)) / world
    fed = rows.rank * (max(rows.microbatches) + 1) + rows.micro
    if span == "rank-microbatch":
        return _inverse(_sums(n, fed)) / (np.array(rows.microbatches)[rows.rank] * world)
    if span == "rows":
        return _inverse(_sums(n, fed)) * _sums(ones, fed) / len(rows)
    raise ValueError(f"unknown denominator {span!r}")


def row_coefficients(rows: Rows, semantics: Semantics) -> tuple[np.ndarray, np.ndarray]:
    """(factors on token-averaged terms, factors on row-averaged terms), each float64 (N,), under a semantics."""
    tokens = token_coefficients(rows, semantics.denominator)
    if semantics.auxiliary == "window":
        auxiliary = np.full(len(rows), 1 / len(rows))
    else:
        auxiliary = token_coefficients(rows, semantics.auxiliary)
    scale = len(rows.microbatches) if semantics.reduction == "sum" else 1.0
    kept = np.ones(len(rows))
    if semantics.accumulation == "last":
        kept = (rows.micro == max(rows.microbatches) - 1).astype(np.float64)
    return tokens * scale * kept, auxiliary * scale * kept


def _sums(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """For each row, the sum of `values` over the rows of its group."""
    _, inverse = np.unique(group, return_inverse=True)
    return np.bincount(inverse, weights=values)[inverse]


def _inverse(x: np.ndarray) -> np.ndarray:
    return np.divide(1.0, x, out=np.zeros_like(x, dtype=np.float64), where=x > 0)
