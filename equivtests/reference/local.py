"""Local SGD: workers that step alone, each on its own data, and whose weights are averaged after every few windows.

McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data, algorithm 1 (with equal
weights); Stich 2019, Local SGD converges fast and communicates little, algorithm 1. Weights alone are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equivtests.cases.case import Case, Semantics
from equivtests.reference.forward import Weights


def workers_of(case: Case, semantics: Semantics) -> tuple[Case, ...]:
    """By data rank, the case of that worker alone; the case itself where no rank steps alone."""
    if not semantics.staleness.period:
        return (case,)
    return tuple(case.replace(worker=rank) for rank in range(case.layout.dp))


def averaged_after(semantics: Semantics, window: int) -> bool:
    """Whether the workers' weights are averaged after a window. Windows count whether or not a step was made in them."""
    period = semantics.staleness.period
    return period > 0 and (window + 1) % period == 0


def mean(weights: Sequence[Weights]) -> Weights:
    """The mean over workers, in the dtype of their weights."""
    return {name: torch.stack([worker[name] for worker in weights]).mean(dim=0) for name in weights[0]}
