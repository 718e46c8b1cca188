"""Expert parallelism: every rank holds some of the experts, and tokens travel to the experts that they are routed to.

Lepikhin et al. 2020, GShard, section 3.2; Fedus, Zoph, Shazeer 2022, Switch Transformers, section 2.2. The ranks that share
the experts are data ranks, so an expert's gradient is made of the tokens of all of them when its backward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims
from equivtests.adapters.places import show
from equivtests.adapters.textbook.lines import Line
from equivtests.adapters.textbook.mesh import SPLIT_FEATURES, Mesh, split_strategy
from equivtests.adapters.torch_adapter import SHOWN
from equivtests.models.moe import DROPPED, Experts, MoE
from equivtests.record.observation import Observe, Place


class HeldExperts(Experts):
    """Some of the experts, under their numbers, `span` of `total`; `line` holds all of them.

    taken: int64 (experts here,), the tokens that each was given since it was last shown.
    """

    def __init__(self, held: dict[str, nn.Module], line: Line, total: int) -> None:
        super().__init__(held)
        self.line, self.total, self.span = line, total, line.span(total)
        self.taken = torch.zeros(len(held), dtype=torch.int64)

    def count(self, expert: Tensor) -> None:
        """Note the experts, of any rank, that some tokens were given to."""
        table = expert.flatten().cpu()
        self.taken += table[table != DROPPED].bincount(minlength=self.total)[slice(*self.span)]


class Choices(NamedTuple):
    """Every kept choice of a token here, in the order of experts; int64 (C,) each. sent: how many go to each rank."""

    token: Tensor
    slot: Tensor
    expert: Tensor
    sent: list[int]


class DispatchedExperts(HeldExperts):
    """Tokens go to the ranks of their experts, and what those give comes back to its place: two uneven all-to-alls."""

    def forward(self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        choices = self.choices(chosen_TK)
        received = self.received(choices.sent)
        x_RD = self.send(x_TD[choices.token], choices.sent, received)
        y_RD = self.apply_experts(x_RD, exchange(choices.expert, self.line, choices.sent, received))
        y_CD = self.send(y_RD, received, choices.sent)
        return self.combine(y_CD, x_TD, weight_TK, choices)

    def choices(self, chosen_TK: Tensor) -> Choices:
        token, slot = (chosen_TK != DROPPED).nonzero(as_tuple=True)
        order = chosen_TK[token, slot].argsort(stable=True)
        token, slot = token[order], slot[order]
        expert = chosen_TK[token, slot]
        ends = [self.line.span(self.total, rank)[1] for rank in range(self.line.size)]
        owner = torch.searchsorted(torch.tensor(ends, device=expert.device), expert, right=True)
        return Choices(token, slot, expert, owner.bincount(minlength=self.line.size).tolist())

    def received(self, sent: list[int]) -> list[int]:
        """How many rows come from every rank."""
        ones = [1] * self.line.size
        return exchange(torch.tensor(sent), self.line, ones, ones).tolist()

    def send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return Exchange.apply(rows, self.line, sent, received)

    def apply_experts(self, x_RD: Tensor, expert_R: Tensor) -> Tensor:
        """What its expert gives for every row. All experts here are called, so that no gradient is absent."""
        self.count(expert_R)
        return super().forward(x_RD, expert_R[:, None], x_RD.new_ones(len(x_RD), 1))

    def combine(self, y_CD: Tensor, x_TD: Tensor, weight_TK: Tensor, choices: Choices) -> Tensor:
        """Σ over the choices of a token of factor · what the expert gave, (T, D)."""
        weighted = weight_TK[choices.token, choices.slot, None] * y_CD
        return torch.zeros_like(x_TD).index_add(0, choices.token, weighted.to(x_TD.dtype))


class GatheredExperts(HeldExperts):
    """Every rank has its experts see the tokens of all ranks; what the ranks' experts give is added up and cut again."""

    def forward(self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        sizes = self.line.sizes(x_TD, 0)
        chosen = self.line.gather(chosen_TK, 0)
        self.count(chosen)
        given = super().forward(self.gather(x_TD, sizes), chosen, self.gather_weights(weight_TK, sizes))
        return SumTokens.apply(given, self.line, sizes)

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Rows of all ranks, of which rank r has `sizes[r]`."""
        return GatherTokens.apply(x, self.line, sizes)

    def gather_weights(self, weight_TK: Tensor, sizes: list[int]) -> Tensor:
        return self.gather(weight_TK, sizes)


class ExpertParallel(Mesh):
    """Strategies: ep sends tokens to their experts and back, ep-gather has all tokens everywhere."""

    dispatched: ClassVar[type[HeldExperts]] = DispatchedExperts
    gathered: ClassVar[type[HeldExperts]] = GatheredExperts

    def claims(self) -> Claims:
        moe: dict[str, Any] = {
            "families": frozenset({"moe"}),
            "features": SPLIT_FEATURES | {"balance"},
            "observes": SHOWN | {"mask", "output", "routed"},
        }
        return Claims(
            tuple(split_strategy(name, {"dp", "ep"}, algorithm=name, **moe) for name in ("ep", "ep-gather")),
            framework="equivtests textbook",
        )

    def split(self, module: nn.Module) -> None:
        super().split(module)
        self.mixtures = {name: layer for name, layer in module.named_modules() if isinstance(layer, MoE)}
        for name, moe in self.mixtures.items():
            self.split_experts(name, moe)

    def split_experts(self, name: str, moe: MoE) -> None:
        """Keep this rank's experts; the router is whole on every rank."""
        line = self.line("ep")
        held = {str(e): moe.experts[str(e)] for e in range(*line.span(moe.count))}
        moe.experts = self.kind()(held, line, moe.count)
        for parameter in [p for p in self.laid if p.startswith(f"{name}.experts.")]:
            self.lay(parameter, cut=self.laid[parameter].cut | {"ep"})

    def kind(self) -> type[HeldExperts]:
        """How tokens and experts meet."""
        return self.gathered if "gather" in self.strategy else self.dispatched

    def held(self) -> Iterator[tuple[str, HeldExperts]]:
        """(name of the mixture, its experts here)."""
        for name, moe in self.mixtures.items():
            assert isinstance(moe.experts, HeldExperts)
            yield name, moe.experts

    def show_update(self, observe: Observe, loss: Tensor) -> None:
        super().show_update(observe, loss)
        self.show_routed(observe)

    def show_routed(self, observe: Observe) -> None:
        """The tokens of the window that the experts here were given: a part of a sum over all ranks that hold them."""
        copy, parts = self.copy("dp", "cp"), self.line("edp").size
        for name, experts in self.held():
            place = Place((experts.total,), (experts.span,), replica=copy, partial="sum", parts=parts)
            show(observe, "routed", name, experts.taken, update=self.window.update, place=place)
            experts.taken.zero_()


# ---------------------------------------------------------------------------------------------- collectives


def exchange(rows: Tensor, line: Line, sent: list[int], received: list[int]) -> Tensor:
    """All-to-all along the first dimension: in rank order, `sent[r]` rows to rank r, and `received[r]` rows from it."""
    if line.size == 1:
        return rows
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=line.group)
    return found


class Exchange(torch.autograd.Function):
    """Forward: rows to the ranks that work on them. Backward: their gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, line: Line, sent: list[int], received: list[int]) -> Tensor:
        ctx.line, ctx.sent, ctx.received = line, sent, received
        return exchange(rows.view_as(rows), line, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradients[0], ctx.line, ctx.received, ctx.sent), None, None, None


class GatherTokens(torch.autograd.Function):
    """Forward: the rows of all ranks, of which rank r has `sizes[r]`. Backward: the own ones of the summed gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, line: Line, sizes: list[int]) -> Tensor:
        ctx.line, ctx.sizes = line, sizes
        return line.gather(rows.view_as(rows), 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return own(ctx.line, summed(ctx.line, gradients[0]), ctx.sizes), None, None


class SumTokens(torch.autograd.Function):
    """Forward: the own rows, `sizes[r]` on rank r, of the ranks' sum. Backward: the gradients of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, line: Line, sizes: list[int]) -> Tensor:
        ctx.line = line
        return own(line, summed(line, rows), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.line.gather(gradients[0], 0), None, None


def summed(line: Line, rows: Tensor) -> Tensor:
    return line.sum(rows.clone(memory_format=torch.contiguous_format))


def own(line: Line, rows: Tensor, sizes: list[int]) -> Tensor:
    """This rank's rows of those of all ranks."""
    return rows[sum(sizes[: line.index]) :][: sizes[line.index]]
