"""Tolerances: the only place where a distance becomes a verdict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equivtests.judge.check import Verdict

UPDATE_BOUND = 8.0  # in units of epsilon, for optimizers whose arithmetic is their own
THRESHOLD = 8.0  # correct runs stay below 2.5; faults lie orders of magnitude above
SIGNAL_FRACTION = 0.25  # a radius that 8 times over reaches a quarter of the signal cannot tell


@dataclass(frozen=True)
class Distance:
    """`ratio`: |candidate - truth| / radius; `resolution`: threshold · radius / signal."""

    ratio: float
    resolution: float
    verdict: Verdict


def rounded(observed: np.ndarray, truth: np.ndarray, radius: float, signal: float, threshold: float) -> Distance:
    """The rounded lane: a norm over the tensor against the rounding radius (LAPACK's residual ratio)."""
    if observed.shape != truth.shape:
        return Distance(np.inf, 0.0, Verdict.FAIL)
    distance = float(np.linalg.norm(observed.astype(np.float64) - truth))
    ratio = distance / radius if radius > 0 else (0.0 if distance == 0 else np.inf)
    resolution = threshold * radius / signal if signal > 0 else 0.0
    if not np.isfinite(distance):
        return Distance(np.inf, resolution, Verdict.FAIL)
    if max(THRESHOLD, threshold) * radius >= SIGNAL_FRACTION * signal and signal > 0:
        return Distance(ratio, resolution, Verdict.INCONCLUSIVE)
    return Distance(ratio, resolution, Verdict.PASS if ratio <= threshold else Verdict.FAIL)


def equal(observed: np.ndarray, truth: np.ndarray) -> Distance:
    """The exact lane: tolerance zero."""
    same = observed.shape == truth.shape and bool(np.array_equal(observed, truth))
    return Distance(0.0 if same else np.inf, 0.0, Verdict.PASS if same else Verdict.FAIL)


def elementwise(observed: np.ndarray, expected: np.ndarray, before: np.ndarray, eps: float, bitwise: bool) -> Distance:
    """The update stage: max |error| / (eps · max(|w|, |Δw|)) against 8, or against 0 where bits must agree."""
    if not observed.shape == expected.shape == before.shape:
        return Distance(np.inf, 0.0, Verdict.FAIL)
    with np.errstate(invalid="ignore"):  # infinities end as a ratio that is not finite
        error = np.abs(observed.astype(np.float64) - expected.astype(np.float64))
    scale = np.maximum(np.abs(before.astype(np.float64)), np.abs(expected.astype(np.float64) - before))
    unit = eps * np.maximum(scale, np.finfo(np.float32).tiny)
    ratio = float(np.max(error / unit, initial=0.0))
    if not np.isfinite(ratio):
        return Distance(np.inf, 0.0, Verdict.FAIL)
    return Distance(ratio, 0.0, Verdict.PASS if ratio <= (0.0 if bitwise else UPDATE_BOUND) else Verdict.FAIL)


def radius_floor(eps: float, norm: float, scale: float) -> float:
    """Least radius of a tensor: epsilon of its own norm, or of its layer's scale where its true value is zero."""
    return eps * (norm if norm > 1e-6 * scale else scale)
