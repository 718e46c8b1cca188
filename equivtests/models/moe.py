"""A mixture of experts as a feedforward: a router gives each token to the experts that it finds most probable."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equivtests.cases.case import Model
from equivtests.models.feedforward import feedforward
from equivtests.models.parts import widen

DROPPED = -1
"""Stands in the place of an expert that had no room for the token."""


class Experts(nn.ModuleDict):
    """The experts by number. Replace them where ranks hold some of them each."""

    def forward(self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Σ over chosen experts of factor · expert(x), (T, D). Every expert is called, so that no gradient is absent."""
        y_TD = torch.zeros_like(x_TD)
        for name, expert in self.items():
            token, slot = (chosen_TK == int(name)).nonzero(as_tuple=True)
            y_TD = y_TD.index_add(0, token, (weight_TK[token, slot, None] * expert(x_TD[token])).to(y_TD.dtype))
        return y_TD


class MoE(nn.Module):
    """Σ over a token's chosen experts of probability · expert(x), without renormalization.

    Nothing of it depends on how tokens lie on ranks: each expert takes at most `capacity` tokens of every row, in position
    order (0: all of them). After a forward pass `balance` holds the rows' sum of the balance loss (None without the feature)
    and `routed`, int64 (E,), the tokens that each expert took.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.top_k, self.capacity, self.balanced = model.top_k, model.capacity, model.has("balance")
        self.count = model.experts
        self.router = nn.Linear(model.width, model.experts, bias=False)
        self.experts = Experts({str(e): feedforward(model) for e in range(model.experts)})
        self.balance: Tensor | None = None
        self.routed = torch.zeros(model.experts, dtype=torch.int64)

    def forward(self, x_BLD: Tensor) -> Tensor:
        chosen_TK, weight_TK = self.route(x_BLD)
        return self.experts(x_BLD.flatten(0, 1), chosen_TK, weight_TK).view_as(x_BLD)

    def route(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """(experts of every token, int64 (T, k), DROPPED where one had no room; factors on what they give, (T, k))."""
        probability_BLE = self.probabilities(x_BLD)
        weight_BLK, chosen_BLK = probability_BLE.topk(self.top_k, dim=-1)
        self.balance = self.balance_loss(probability_BLE, chosen_BLK) if self.balanced else None
        chosen_BLK = chosen_BLK.where(self.kept(chosen_BLK), DROPPED)
        self.routed = self.tokens(chosen_BLK).sum(dim=0)
        weight_BLK = weight_BLK * (chosen_BLK != DROPPED)
        return chosen_BLK.flatten(0, 1), weight_BLK.flatten(0, 1).to(x_BLD.dtype)

    def probabilities(self, x_BLD: Tensor) -> Tensor:
        """softmax of the router, (B, L, E), in at least float32."""
        return widen(self.router(x_BLD)).softmax(dim=-1)

    def kept(self, chosen_BLK: Tensor) -> Tensor:
        """Whether the expert still had room, bool (B, L, K): by the token's place among those of the row that chose it."""
        if not self.capacity:
            return torch.ones_like(chosen_BLK, dtype=torch.bool)
        takes_BLE = self.one_hot(chosen_BLK).sum(dim=2)
        place_BLK = takes_BLE.cumsum(dim=1).gather(2, chosen_BLK)
        return place_BLK <= self.capacity

    def balance_loss(self, probability_BLE: Tensor, chosen_BLK: Tensor) -> Tensor:
        """Sum over rows of E · Σ_e f_e · P_e: f_e the share of the row's choices, before any drop; P_e its mean probability.

        Fedus, Zoph, Shazeer 2022: Switch Transformers, equations 4 to 6.
        """
        share_BE = self.tokens(chosen_BLK).to(probability_BLE.dtype) / (chosen_BLK.shape[1] * self.top_k)
        return self.count * (share_BE * probability_BLE.mean(dim=1)).sum()

    def tokens(self, chosen_BLK: Tensor) -> Tensor:
        """Tokens of every row that each expert takes, int64 (B, E)."""
        return self.one_hot(chosen_BLK).sum(dim=(1, 2))

    def one_hot(self, chosen_BLK: Tensor) -> Tensor:
        """int64 (B, L, K, E)."""
        return (chosen_BLK[..., None] == torch.arange(self.count, device=chosen_BLK.device)).long()
