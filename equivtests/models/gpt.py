"""A tiny decoder: embedding and positions, pre-norm blocks with causal attention and a GELU MLP, a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivtests.cases.case import Model
from equivtests.models.parts import Dropout, DropoutStream, Terms, Unused, cross_entropy, widen

HEADS = 2


class Attention(nn.Module):
    """Causal attention with two heads; keys have no bias, since its gradient is analytically zero."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, size, bias = model.width, model.width // HEADS, model.has("bias")
        self.size, shared = size, size if model.has("shared_kv") else width
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, shared, bias=False)
        self.v = nn.Linear(width, shared, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)
        self.q_norm = nn.LayerNorm(size, bias=False) if model.has("qk_norm") else nn.Identity()
        self.k_norm = nn.LayerNorm(size, bias=False) if model.has("qk_norm") else nn.Identity()

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (self._heads(layer(x_BLD)) for layer in (self.q, self.k, self.v))
        k, v = k.expand_as(q), v.expand_as(q)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(-1, (-1, self.size)).transpose(1, 2)


class Feedforward(nn.Module):
    """up, GELU (erf), down."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up = nn.Linear(model.width, 2 * model.width, bias=model.has("bias"))
        self.down = nn.Linear(2 * model.width, model.width, bias=model.has("bias"))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BLD)))


class Block(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(model.width, bias=model.has("bias"))
        self.attention = Attention(model)
        self.norm2 = nn.LayerNorm(model.width, bias=model.has("bias"))
        self.mlp = Feedforward(model)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD))
        return x_BLD + self.mlp(self.norm2(x_BLD))


class GPT(nn.Module):
    """Token loss by cross-entropy; optional second head and z-loss."""

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__()
        width, vocabulary = model.width, model.vocabulary
        self.z_loss = model.has("z_loss")
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(model.length, width)
        self.layers = nn.ModuleList([Block(model) for _ in range(model.depth)])
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
        self.dropout = Dropout("gpt", stream) if model.has("dropout") else None

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        x = self.embedding(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        if self.dropout is not None:
            x = self.dropout(x, ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if conditional and hasattr(self, "branch"):
            x = x + self.branch(x)
        logits = self.head(x)
        terms = {"main": cross_entropy(logits, targets, valid)}
        if hasattr(self, "extra_head"):
            terms["extra"] = cross_entropy(self.extra_head(x), targets, valid)
        if self.z_loss:
            terms["z"] = ((widen(logits).logsumexp(dim=-1) ** 2) * valid).sum()
        return terms
