"""A tiny decoder: embedding and positions, pre-norm blocks with causal attention and a feedforward, a head.

What needs more than one position, one head or one part of the vocabulary stands in objects of its own (`sequence`, `spread`,
`kv_of`, `vocabulary`), which frameworks that cut a model over ranks replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from equivtests.cases.case import Model
from equivtests.models.feedforward import feedforward
from equivtests.models.moe import MoE
from equivtests.models.parts import Dropout, DropoutStream, Terms, Unused
from equivtests.models.sequence import WholeSequence
from equivtests.models.staged import Staged
from equivtests.models.vocabulary import SMOOTHING, WholeVocabulary


class Attention(nn.Module):
    """Causal attention; keys have no bias, since its gradient is analytically zero.

    size: features of a head. kv_of: for each query head here, the head of keys and values that it uses.
    sequence: who sees whom, the same object in all blocks of a model.
    """

    def __init__(self, model: Model, sequence: WholeSequence) -> None:
        super().__init__()
        width, size, bias = model.width, model.width // model.heads, model.has("bias")
        self.size, shared, self.sequence = size, model.kv * size, sequence
        self.kv_of = [head * model.kv // model.heads for head in range(model.heads)]
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, shared, bias=False)
        self.v = nn.Linear(width, shared, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)
        self.q_norm = nn.LayerNorm(size, bias=False) if model.has("qk_norm") else nn.Identity()
        self.k_norm = nn.LayerNorm(size, bias=False) if model.has("qk_norm") else nn.Identity()

    def forward(self, x_BLD: Tensor, inputs: Tensor) -> Tensor:
        q, k, v = (self._heads(layer(x_BLD)) for layer in (self.q, self.k, self.v))
        k, v = self._shared(k), self._shared(v)
        mixed = self.sequence.attention(self.q_norm(q), self.k_norm(k), v, inputs)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def _shared(self, k_BHLD: Tensor) -> Tensor:
        """Keys or values of every query head. One head is expanded, not copied: its gradient is one sum."""
        if k_BHLD.shape[1] == 1:
            return k_BHLD.expand(-1, len(self.kv_of), -1, -1)
        return k_BHLD if self.kv_of == list(range(k_BHLD.shape[1])) else k_BHLD[:, self.kv_of]


class Block(nn.Module):
    """x + attention(norm1(x)), then x + feedforward(norm2(x)); the feedforward is named mlp, or moe."""

    def __init__(self, model: Model, sequence: WholeSequence) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.width, bias=model.has("bias"))
        self.attention = Attention(model, sequence)
        self.norm2 = nn.LayerNorm(model.width, bias=model.has("bias"))
        if model.experts:
            self.moe = MoE(model)
        else:
            self.mlp = feedforward(model)

    def forward(self, x_BLD: Tensor, inputs: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD), inputs)
        feed = self.moe if hasattr(self, "moe") else self.mlp
        return x_BLD + feed(self.norm2(x_BLD))


class GPT(Staged):
    """Token loss by cross-entropy; optional second head, z-loss and balance loss.

    sequence: see `use_sequence`. vocabulary: the losses over logits. spread: applied to embedding + positions, before
    dropout; where ranks share out a sequence between the layers, it cuts this rank's part.
    """

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__(model.depth)
        width, vocabulary = model.width, model.vocabulary
        self.z_loss, self.balanced = model.has("z_loss"), model.has("balance")
        self.sequence = WholeSequence(packed=model.has("packed"))
        self.vocabulary = WholeVocabulary(SMOOTHING if model.has("smoothing") else 0.0)
        self.spread: Callable[[Tensor], Tensor] = unchanged
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(model.length, width)
        self.layers = nn.ModuleList([Block(model, self.sequence) for _ in range(model.depth)])
        self.norm = nn.LayerNorm(width, bias=model.has("bias"))
        if model.has("conditional"):
            self.branch = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if model.has("tied"):
            self.head.weight = self.embedding.weight
        if model.has("extra_head"):
            self.extra_head = nn.Linear(width, vocabulary, bias=False)
        if model.has("unused"):
            self.unused = Unused(width)
        self.dropout = Dropout(model.family, stream) if model.has("dropout") else None

    def use_sequence(self, sequence: WholeSequence) -> None:
        """Put another object in the place of `sequence`, here and in every attention."""
        self.sequence = sequence
        for module in self.modules():
            if isinstance(module, Attention):
                module.sequence = sequence

    def begin(self, inputs: Tensor, ids: Tensor) -> Tensor:
        x = self.spread(self.embedding(inputs) + self.positions(self.sequence.positions(inputs)))
        return x if self.dropout is None else self.dropout(x, ids)

    def layer(self, i: int, x: Tensor, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.layers[i](x, inputs))

    def end(self, x: Tensor, targets: Tensor, valid: Tensor, conditional: bool) -> Terms:
        x = self.norm(x)
        if conditional and hasattr(self, "branch"):
            x = x + self.branch(x)
        logits = self.head(x)
        terms = {"main": self.token_loss(logits, targets, valid)}
        if hasattr(self, "extra_head"):
            terms["extra"] = self.token_loss(self.extra_head(x), targets, valid)
        if self.z_loss:
            terms["z"] = (self.vocabulary.log_partition(logits) ** 2 * valid).sum()
        if self.balanced:
            terms["balance"] = self.balance(terms["main"])
        return terms

    def token_loss(self, logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        """Sum of the losses of valid tokens; logits (N, L, V), targets and valid (N, L)."""
        return (self.vocabulary.losses(logits, targets) * valid).sum()

    def balance(self, like: Tensor) -> Tensor:
        """Sum of what the last forward pass left in the layers that are here; a scalar, zero if there are none."""
        left = [m.balance for m in self.modules() if isinstance(m, MoE) and m.balance is not None]
        return torch.stack(left).sum() if left else like.new_zeros(())


def unchanged(x: Tensor) -> Tensor:
    """What one device does with a sequence: keep it whole."""
    return x
