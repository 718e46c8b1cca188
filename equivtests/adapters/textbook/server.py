"""A parameter server that waits for all workers, which makes it equal to one device.

Li et al. 2014, Scaling distributed machine learning with the parameter server: workers push gradients, servers add them up,
make the optimizer's step on their share of the parameters, and workers pull the new weights (section 2.2, algorithm 1).
Waiting for every worker is its sequential consistency (section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims
from equivtests.adapters.textbook.dp import TEXTBOOK_OBSERVES
from equivtests.adapters.textbook.flat import FlatLayout, Piece
from equivtests.adapters.textbook.messages import deliver
from equivtests.adapters.textbook.zero import Zero1, zero_claims
from equivtests.record.observation import Observe
from equivtests.reference.ledger import Cut

Named = Sequence[tuple[str, Tensor]]
Shares = list[list[Piece]]
"""By rank, the pieces of parameters that it serves, end to end in one vector; no piece: it is a worker only."""


def on_the_first(named: Named, ranks: int) -> Shares:
    """One server has all parameters."""
    return [whole(named), *([] for _ in range(ranks - 1))]


def by_turns(named: Named, ranks: int) -> Shares:
    """Every rank serves whole parameters, which are dealt out one by one."""
    return [whole(named[rank::ranks]) for rank in range(ranks)]


def slices(named: Named, ranks: int) -> Shares:
    """Every rank serves an interval of one vector of all parameters."""
    flat = FlatLayout(list(named), ranks)
    return [flat.pieces(rank) for rank in range(ranks)]


def whole(named: Named) -> list[Piece]:
    """All of these parameters on one rank."""
    return FlatLayout(list(named), 1).pieces(0) if named else []


SHARES: dict[str, tuple[Callable[[Named, int], Shares], Cut]] = {
    "ps-sync": (on_the_first, "first"),
    "ps-sync-sharded": (by_turns, "turns"),
    "ps-sync-sliced": (slices, "flat"),
}
"""By strategy: what each rank serves, and how `reference.ledger.Cut` calls that."""


class ParameterServer(Zero1):
    """Every rank is a worker; the ranks that serve a share keep its weights, its gradients and its optimizer state."""

    def claims(self) -> Claims:
        claims = zero_claims(1, {"state"}, "parameter-server", TEXTBOOK_OBSERVES | {"weight_norm"})
        (like,) = claims.strategies
        served = (
            replace(like, name=name, cut=cut, replicates=False, variant=name != "ps-sync")
            for name, (_, cut) in SHARES.items()
        )
        return replace(claims, strategies=tuple(served))

    # ------------------------------------------------------------------ shares

    def wrap(self, module: nn.Module) -> nn.Module:
        self.whole = self.sharded_parameters(module)
        self.flat = FlatLayout(list(self.whole), 1)
        self.shares = SHARES[self.strategy][0](self.whole, self.ranks.world)
        self.shard = self.share_of([p.detach() for _, p in self.whole], self.ranks.rank)
        self.pieces = [(p, nn.Parameter(self.cut(self.shard, p))) for p in self.shares[self.ranks.rank]]
        self.replica = 0
        return module

    def share_of(self, tensors: list[Tensor], server: int) -> Tensor:
        """What a server serves of tensors like all parameters, as one vector."""
        flat = dict(zip((name for name, _ in self.whole), (t.reshape(-1) for t in tensors), strict=True))
        parts = [flat[piece.name][piece.start : piece.stop] for piece in self.shares[server]]
        return torch.cat(parts) if parts else tensors[0].new_empty(0)

    def servers(self) -> list[int]:
        return [rank for rank, share in enumerate(self.shares) if share]

    # ------------------------------------------------------------------ gradients

    def synchronize(self) -> None:
        self.mark_used()
        self.set_shard_gradient(self.average(self.add_up(self.push(self.worker_gradients()))))

    def worker_gradients(self) -> list[Tensor]:
        """This worker's gradients, like all parameters, zero where there is none; the parameters' own are freed."""
        return self.flat.unflatten(self.local_gradient())

    def push(self, gradients: list[Tensor]) -> list[Tensor]:
        """Every server gets its share of this worker's gradients; returns what this server got, by worker."""
        return self.exchange(
            [self.share_of(gradients, server) for server in range(self.ranks.world)],
            [torch.empty_like(self.shard) for _ in range(self.ranks.world)],
        )

    def add_up(self, arrived: list[Tensor]) -> Tensor:
        """The sum of the workers' gradients, in the order of their ranks, whichever came first."""
        total = torch.zeros_like(self.shard)
        for gradient in arrived:
            total += gradient
        return total

    # ------------------------------------------------------------------ clipping, by the servers

    def clip(self, observe: Observe) -> None:
        if self.pieces:
            super().clip(observe)

    def gradient_norm(self, order: float) -> Tensor:
        """The norm of all servers' parts of it, each of which counts its own share."""
        gradients = [p.grad for _, p in self.pieces if p.grad is not None]
        own = torch.linalg.vector_norm(torch.cat([*gradients, self.shard.new_zeros(1)]), order)
        return torch.linalg.vector_norm(self.tell_servers(own), order)

    def tell_servers(self, own: Tensor) -> Tensor:
        """A scalar of every server, in the order of their ranks."""
        others = [server for server in self.servers() if server != self.ranks.rank]
        told = {server: torch.empty_like(own) for server in others}
        deliver(dict.fromkeys(others, own), told)
        return torch.stack([own if server == self.ranks.rank else told[server] for server in self.servers()])

    # ------------------------------------------------------------------ weights

    def publish(self) -> None:
        self.take_over(self.pull())

    def pull(self) -> list[Tensor]:
        """Every worker gets every server's weights; returns them by server."""
        sizes = [sum(p.stop - p.start for p in share) for share in self.shares]
        return self.exchange([self.shard] * self.ranks.world, [self.shard.new_empty(size) for size in sizes])

    def take_over(self, arrived: list[Tensor]) -> None:
        """Put the servers' weights into this worker's model."""
        for server, share in enumerate(self.shares):
            self.take_share(share, arrived[server])

    def take_share(self, share: list[Piece], weights: Tensor) -> None:
        """One server's weights."""
        parameters = dict(self.whole)
        for piece in share:
            flat = parameters[piece.name].detach().reshape(-1).clone()
            flat[piece.start : piece.stop] = self.cut(weights, piece)
            parameters[piece.name].data.copy_(flat.view(piece.shape))

    def exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[Tensor]:
        """Messages to and from all other ranks, both listed by rank; returns what came, with what the rank gives itself."""
        others = [rank for rank in range(self.ranks.world) if rank != self.ranks.rank]
        deliver({rank: outgoing[rank] for rank in others}, {rank: incoming[rank] for rank in others})
        incoming[self.ranks.rank].copy_(outgoing[self.ranks.rank])
        return incoming
