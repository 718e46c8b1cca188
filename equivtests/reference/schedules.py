"""Pipeline schedules of the field: the order that each prescribes, and what follows from it in closed form.

Sources. GPipe: Huang et al., NeurIPS 2019, section 2.3; its backward passes here in the order of micro-batches, as
Narayanan et al. draw it. 1F1B (PipeDream-Flush) and its interleaved form: Narayanan et al., Efficient large-scale
language model training on GPU clusters using Megatron-LM, SC 2021, section 2.2; rounds of more than P micro-batches: as
in torch.distributed.pipelining. Looped BFS: Lamy-Poirier, Breadth-first pipeline parallelism, MLSys 2023; its backward
passes last in, first out, as in torch.distributed.pipelining.
Zero bubble (ZB-H1) and ZB-V: Qi, Wan, Huang and Lin, Zero bubble pipeline parallelism, ICLR 2024, sections 2 and 6.
DualPipeV: github.com/deepseek-ai/DualPipe, dualpipev.py.

P: pipeline ranks; V: stages per rank (chunks of the model); M: micro-batches. Closed forms hold for free communication
and equal costs of stages. Without split backward they hold for any cost of F and of B; with it F, I and W cost the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from equivtests.reference.stages import Placement, ranks_of_stages
from equivtests.reference.timeline import Operation, Timeline

Order = Callable[[int, int, int, int], list[Operation]]
"""(rank, P, V, M) to the operations of that rank, for numbers that the schedule is defined for."""


@dataclass(frozen=True)
class Schedule:
    """One row of `SCHEDULES`.

    order: what each rank runs. placement: where stages lie. split: whether there are backwards in two halves. chunks: the
    V that it is defined for; None: any. least: (P, V) to the fewest micro-batches that torch.distributed.pipelining
    takes; of the order itself only DualPipeV needs them. idle_fraction: (P, V, M) to the idle fraction; None: no closed
    form, simulate. peak_live: (P, V, M) to the most live activations of each rank, or None likewise.
    """

    order: Order
    placement: Placement = "loop"
    split: bool = False
    chunks: int | None = None
    least: Callable[[int, int], int] = lambda P, V: 1
    idle_fraction: Callable[[int, int, int], Fraction | None] = lambda P, V, M: None
    peak_live: Callable[[int, int, int], tuple[int, ...] | None] = lambda P, V, M: None


def placement(schedule: str, P: int, V: int) -> tuple[int, ...]:
    """The rank of each of the P · V stages."""
    return ranks_of_stages(SCHEDULES[schedule].placement, P, V)


def prescribed(schedule: str, P: int, V: int, M: int) -> Timeline:
    """The order that a schedule prescribes. Raises ValueError for numbers that it is not defined for, saying why."""
    row = SCHEDULES[schedule]
    if min(P, V, M) < 1:
        raise ValueError(f"{schedule}: ranks, stages per rank and micro-batches must be at least 1, got {P}, {V}, {M}")
    if row.chunks not in (None, V):
        raise ValueError(f"{schedule} has {row.chunks} stage(s) per rank, got {V}")
    return tuple(tuple(row.order(rank, P, V, M)) for rank in range(P))


# ------------------------------------------------------------------------------- one stage after the other


def _gpipe(rank: int, P: int, V: int, M: int) -> list[Operation]:
    """All forwards, then all backwards."""
    return [Operation(kind, rank, m) for kind in "FB" for m in range(M)]


def _breadth_first(rank: int, P: int, V: int, M: int) -> list[Operation]:
    """All micro-batches through one stage before the next stage of the rank; then back, last in, first out."""
    forward = [Operation("F", chunk * P + rank, m) for chunk in range(V) for m in range(M)]
    return [*forward, *(Operation("B", f.stage, f.microbatch) for f in reversed(forward))]


# ----------------------------------------------------------------------------- one forward, one backward


def _round(P: int, V: int, M: int) -> int:
    """Micro-batches that pass a stage of a rank before its next stage has its turn: P, if P divides M.

    Raises ValueError where rounds of at least P micro-batches cannot be equal.
    """
    rounds = 1 if V == 1 else max(1, M // P)
    if M % rounds:
        raise ValueError(f"{M} micro-batches cannot be cut into {rounds} equal rounds of at least {P} (the ranks)")
    return M // rounds


def _warmup(rank: int, P: int, V: int, M: int, hops: int) -> int:
    """Forwards before the first backward; in the steady state there is one more. hops: 2 fill the pipeline without idle
    slots where a rank has several stages; 1 suffices where it has one, or where W fills them."""
    return min(M * V, (V - 1) * _round(P, V, M) + hops * (P - 1 - rank))


def _depth_first(rank: int, P: int, V: int, M: int, hops: int, split: bool = False) -> list[Operation]:
    """Warm up, then one forward and one backward in turn. split: each W comes `rank` backwards after its I, or last.

    So with ZB-H1: rank r, which warms up r forwards less than rank 0, keeps as many activations alive.
    """
    size = _round(P, V, M)
    turns = [(chunk, first + n) for first in range(0, M, size) for chunk in range(V) for n in range(size)]
    forward = [(chunk * P + rank, m) for chunk, m in turns]
    backward = [((V - 1 - chunk) * P + rank, m) for chunk, m in turns]
    warmup = _warmup(rank, P, V, M, hops)
    order = [Operation("F", *turn) for turn in forward[:warmup]]
    for n, turn in enumerate(backward):
        order += [Operation("F", *f) for f in forward[warmup + n : warmup + n + 1]]
        order.append(Operation("I" if split else "B", *turn))
        order += [Operation("W", *backward[n - rank])] if split and n >= rank else []
    return order + [Operation("W", *turn) for turn in backward[max(0, len(backward) - rank) :] if split]


def _one_f_one_b(rank: int, P: int, V: int, M: int) -> list[Operation]:
    return _depth_first(rank, P, V, M, hops=1)


def _interleaved(rank: int, P: int, V: int, M: int) -> list[Operation]:
    return _depth_first(rank, P, V, M, hops=2)


def _zero_bubble(rank: int, P: int, V: int, M: int) -> list[Operation]:
    return _depth_first(rank, P, V, M, hops=1, split=True)


# ------------------------------------------------------------------------------------------------ V shape


class _TwoStages:
    """The order of a rank that holds stages `rank` (0) and `2P - 1 - rank` (1), written down step by step.

    Every pass takes the next micro-batch of its kind and stage.
    """

    def __init__(self, rank: int, P: int) -> None:
        self.stages = rank, 2 * P - 1 - rank
        self.order: list[Operation] = []
        self.next: Counter[str] = Counter()
        self.pending: list[tuple[int, int]] = []

    def run(self, times: int, *passes: str) -> None:
        """passes: such as "F0", "B1"; "W1" is the oldest W of stage 1 that is pending, "W" the oldest of all."""
        for _ in range(times):
            for one in passes:
                if one[0] == "W":
                    self._weights(one[1:])
                else:
                    self._pass(one[0], int(one[1]))

    def _pass(self, kind: str, local: int) -> None:
        counter = f"{'F' if kind == 'F' else 'B'}{local}"
        turn = self.stages[local], self.next[counter]
        self.next[counter] += 1
        self.order.append(Operation(kind, *turn))
        self.pending += [turn] if kind == "I" else []

    def _weights(self, local: str) -> None:
        turn = next((t for t in self.pending if not local or t[0] == self.stages[int(local)]), None)
        if turn is not None:
            self.pending.remove(turn)
            self.order.append(Operation("W", *turn))


def _zbv(rank: int, P: int, V: int, M: int) -> list[Operation]:
    """With fewer than 2P - 1 micro-batches: the order for 2P - 1, without those that are not there."""
    count = max(2 * P - 1, M)
    two = _TwoStages(rank, P)
    two.run(2 * (P - rank) - 1, "F0")
    two.run(rank, "F1", "F0")
    two.run(P - rank, "F1", "I1", "W1")
    two.run(count - 2 * P + 1 + rank, "F0", "I0", "W0", "F1", "I1", "W1")
    two.run(P - 1 - rank, "I0", "W0", "F1", "I1", "W1")
    two.run(rank, "I0", "I1")
    two.run(P - rank, "I0", "W0")
    two.run(count, "W1")
    two.run(count, "W0")
    return [operation for operation in two.order if operation.microbatch < M]


def _dualpipev(rank: int, P: int, V: int, M: int) -> list[Operation]:
    """The eight steps of dualpipev.py; passes that it overlaps stand one after the other."""
    if M < 2 * P:
        raise ValueError(f"dualpipev needs at least as many micro-batches as stages ({2 * P}), got {M}")
    after = P - 1 - rank
    two = _TwoStages(rank, P)
    two.run(2 * after, "F0")
    two.run(rank + 1, "F0", "F1")
    two.run(after, "I1", "W", "F1")
    two.run(M - 2 * P + rank + 1, "F0", "B1", "F1", "B0")
    two.run(after, "B1", "F1", "B0")
    halves = (rank + 1) // 2
    two.run(halves, "B1", "B0")
    two.run(1 - rank % 2, "B1", "I0")
    two.run(rank + 1 - halves - (1 - rank % 2), "I1", "I0")
    two.run(after, "W", "I0")
    two.run(rank + 1, "W")
    return two.order


# -------------------------------------------------------------------------------------------- closed forms


def _idle_whole(P: int, V: int, M: int) -> Fraction:
    """(P-1)/(VM+P-1): Narayanan et al. 2021, sections 2.2.1 and 2.2.2, for M of at least P.

    With fewer a rank waits P - M slots more for each further stage: its micro-batches are not through the other ranks.
    """
    lost = P - 1 + (V - 1) * max(0, P - M)
    return Fraction(lost, V * M + lost)


def _idle_halves(P: int, V: int, M: int) -> Fraction | None:
    """(P-1)(F+I-W) lost: Qi et al. 2024, section 2.3, for M of at least P."""
    return Fraction(P - 1, 3 * V * M + P - 1) if M >= P else None


def _peak_depth_first(hops: int, split: bool = False) -> Callable[[int, int, int], tuple[int, ...]]:
    """What is warmed up and one more; with late W those that wait for it, too."""
    return lambda P, V, M: tuple(
        min(V * M, _warmup(rank, P, V, M, hops) + 1 + (rank if split else 0)) for rank in range(P)
    )


def _peak_all(P: int, V: int, M: int) -> tuple[int, ...]:
    """Everything, at the turn from forward to backward."""
    return (V * M,) * P


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(_gpipe, chunks=1, idle_fraction=_idle_whole, peak_live=_peak_all),
    "1f1b": Schedule(
        _one_f_one_b, chunks=1, least=lambda P, V: P, idle_fraction=_idle_whole, peak_live=_peak_depth_first(hops=1)
    ),
    "interleaved-1f1b": Schedule(_interleaved, idle_fraction=_idle_whole, peak_live=_peak_depth_first(hops=2)),
    "looped-bfs": Schedule(_breadth_first, idle_fraction=_idle_whole, peak_live=_peak_all),
    "zero-bubble": Schedule(
        _zero_bubble, split=True, idle_fraction=_idle_halves, peak_live=_peak_depth_first(hops=1, split=True)
    ),
    "zbv": Schedule(_zbv, placement="v", split=True, chunks=2),
    "dualpipev": Schedule(_dualpipev, placement="v", split=True, chunks=2, least=lambda P, V: 2 * P),
}
"""By name. Where torch.distributed.pipelining has the schedule, it runs the same order."""
