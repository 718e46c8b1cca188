"""Stages of a pipeline: which layers make a stage, and which rank holds it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Literal

Placement = Literal["loop", "v"]
"""loop: stage s on rank s mod P (Narayanan et al. 2021, section 2.2). v: down the ranks and up again, and so on, so
that with two stages per rank the first rank holds the first and the last stage (Qi et al., arXiv 2401.10241, section 6).
"""


def ranks_of_stages(placement: Placement, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of ranks · chunks stages. chunks: stages per rank. Raises ValueError for numbers below 1."""
    if ranks < 1 or chunks < 1:
        raise ValueError(f"a pipeline has at least 1 rank and 1 stage per rank, got {ranks} and {chunks}")
    down = tuple(range(ranks))
    up = tuple(reversed(down)) if placement == "v" else down
    return tuple(rank for chunk in range(chunks) for rank in (up if chunk % 2 else down))


def cut_by_cost(costs: Sequence[float | Fraction], stages: int) -> tuple[int, ...]:
    """Layers per stage, in their order and at least one each, such that the most expensive stage costs least.

    Among those cuts: the most even one in numbers of layers (least sum of squares); then the one with more layers in
    earlier stages. Exact, by dynamic programming over rational costs. Raises ValueError for fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages of at least one layer")
    sums = [sum((Fraction(cost) for cost in costs[:end]), start=Fraction(0)) for end in range(len(costs) + 1)]

    def sizes(start: int, left: int) -> range:
        """Layers that the next of `left` stages may take."""
        rest = len(costs) - start
        return range(rest, rest + 1) if left == 1 else range(1, rest - left + 2)

    @cache
    def largest(start: int, left: int) -> Fraction:
        """The least possible cost of the most expensive of `left` stages made of the layers from `start` on."""
        if not left:
            return Fraction(0)
        return min(max(sums[start + n] - sums[start], largest(start + n, left - 1)) for n in sizes(start, left))

    @cache
    def even(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squares, minus the layers per stage) of the best cut within the limit; infinite if there is none."""
        if not left:
            return 0, ()
        allowed = [n for n in sizes(start, left) if sums[start + n] - sums[start] <= limit]
        rests = [(n, *even(start + n, left - 1)) for n in allowed]
        return min(((n * n + squares, (-n, *cut)) for n, squares, cut in rests), default=(float("inf"), ()))

    limit = largest(0, stages)
    return tuple(-n for n in even(0, stages)[1])
