"""Tensor parallelism: linear layers cut by columns and by rows, the vocabulary cut, and sequence parallelism between them.

Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, Reducing Activation Recomputation, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from equivtests.adapters.adapter import Claims
from equivtests.adapters.textbook.lines import Copy, Gather, GatherForWork, Line, Reduce, ReduceScatter, Scatter
from equivtests.adapters.textbook.mesh import SPLIT_FEATURES, Mesh, split_strategy
from equivtests.models.gpt import GPT, Attention
from equivtests.models.parts import widen
from equivtests.models.vocabulary import WholeVocabulary

Step = Callable[[Tensor], Tensor]


class ColumnLinear(nn.Module):
    """Some of the outputs of a linear layer. weight (outputs here, inputs), bias (outputs here)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, enter: Step, leave: Step) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.enter, self.leave = enter, leave

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(self.enter(x), self.weight, self.bias))


class RowLinear(nn.Module):
    """A linear layer of some of the inputs. weight (outputs, inputs here); bias (outputs), added once, after the sum."""

    def __init__(self, weight: Tensor, bias: Tensor | None, enter: Step, leave: Step) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.enter, self.leave = enter, leave

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(F.linear(self.enter(x), self.weight))
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Module):
    """The vectors of some tokens, zero for the others; weight (tokens here, width), the first of them number `start`."""

    def __init__(self, weight: Tensor, start: int, leave: Step) -> None:
        super().__init__()
        self.weight, self.start, self.leave = weight, start, leave

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        here = (local >= 0) & (local < len(self.weight))
        vectors = F.embedding(local.where(here, 0), self.weight)
        return self.leave(vectors * here[..., None])


class VocabularyLosses(WholeVocabulary):
    """Losses over logits of which each rank holds those of some tokens, `start` being the first here."""

    def __init__(self, smoothing: float, line: Line, start: int, vocabulary: int) -> None:
        super().__init__(smoothing)
        self.line, self.start, self.vocabulary = line, start, vocabulary

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = widen(logits)
        partition = self.log_partition(logits)
        loss = partition - self.target_logit(logits, targets)
        if not self.smoothing:
            return loss
        return (1 - self.smoothing) * loss + self.smoothing * (partition - self.mean_logit(logits))

    def log_partition(self, logits: Tensor) -> Tensor:
        logits = widen(logits)
        highest = self.line.max(logits.detach().amax(dim=-1))
        return self.total((logits - highest[..., None]).exp().sum(dim=-1)).log() + highest

    def target_logit(self, logits: Tensor, targets: Tensor) -> Tensor:
        local = targets - self.start
        here = (local >= 0) & (local < logits.shape[-1])
        chosen = logits.gather(-1, local.where(here, 0)[..., None]).squeeze(-1)
        return self.total(chosen * here)

    def mean_logit(self, logits: Tensor) -> Tensor:
        return self.total(logits.sum(dim=-1)) / self.vocabulary

    def total(self, part: Tensor) -> Tensor:
        """The sum over the ranks, differentiable."""
        return Reduce.apply(part, self.line)


class TensorParallel(Mesh):
    """Strategies: tp, tp-sequence; tp-column and tp-row cut every linear layer of a linear or mlp in one way."""

    def claims(self) -> Claims:
        plain = frozenset({"linear", "mlp", "gated_mlp"})
        features = SPLIT_FEATURES | {"transposed"}
        return Claims(
            (
                split_strategy("tp-column", {"dp", "tp"}, families=plain, features=features, algorithm="tp-column"),
                split_strategy("tp-row", {"dp", "tp"}, families=plain, features=features, algorithm="tp-row"),
                split_strategy("tp", {"dp", "tp"}, families=plain | {"gpt"}, features=features, algorithm="tp"),
                split_strategy("tp-sequence", {"dp", "tp"}, algorithm="tp-sequence"),
            ),
            framework="equivtests textbook",
        )

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and what stands between the layers see a part of each sequence only."""
        return "sequence" in self.strategy

    def split(self, module: nn.Module) -> None:
        super().split(module)
        self.tp = self.line("tp")
        if self.tp.size == 1:
            return
        if isinstance(module, GPT):
            self.split_gpt(module)
        else:
            self.split_plain(module)

    # ------------------------------------------------------------------ what goes where

    def split_plain(self, module: nn.Module) -> None:
        """linear, mlp, gated_mlp: columns then rows, so that nothing is exchanged between two layers."""
        names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        for i, name in enumerate(names):
            if self.strategy.startswith("tp-column"):
                self.column(module, name, leave=self.gather)
            elif self.strategy.startswith("tp-row"):
                self.row(module, name, enter=self.scatter)
            elif name == "down" or (i % 2 == 1 and name.startswith("layers.")):
                self.row(module, name)
            else:
                last = i == len(names) - 1
                self.column(module, name, leave=self.gather if last else same)

    def split_gpt(self, module: GPT) -> None:
        for i in range(module.depth):
            self.split_attention(module, f"layers.{i}.attention")
            for name in ("gate", "up"):
                if hasattr(module.get_submodule(f"layers.{i}.mlp"), name):
                    self.column(module, f"layers.{i}.mlp.{name}", enter=same)
            self.row(module, f"layers.{i}.mlp.down")
            self.enter_once(module, f"layers.{i}.attention")
            self.enter_once(module, f"layers.{i}.mlp")
        self.split_vocabulary(module)
        if self.sequence_parallel:
            self.split_sequence(module)

    def enter_once(self, module: nn.Module, name: str) -> None:
        """Exchange what enters a block once, for all column-parallel layers that it begins with."""
        block = module.get_submodule(name)
        block.register_forward_pre_hook(lambda _, arguments: (self.enter(arguments[0]), *arguments[1:]))

    def split_attention(self, module: nn.Module, name: str) -> None:
        """Whole heads to every rank; heads of keys and values that several ranks use stay whole on all of them."""
        attention = module.get_submodule(name)
        assert isinstance(attention, Attention)
        model, size = self.case.model, attention.size
        start, stop = self.tp.span(model.heads)
        self.column(module, f"{name}.q", (start * size, stop * size), enter=same)
        used = attention.kv_of[start:stop]
        if model.kv % self.tp.size == 0 and model.heads % self.tp.size == 0:
            low, high = self.tp.span(model.kv)
            self.column(module, f"{name}.k", (low * size, high * size), enter=same)
            self.column(module, f"{name}.v", (low * size, high * size), enter=same)
            attention.kv_of = [head - low for head in used]
        else:
            attention.kv_of = used
            self.whole(module, f"{name}.k")
            self.whole(module, f"{name}.v")
        for norm in ("q_norm", "k_norm"):
            self.lay_partial(f"{name}.{norm}.weight")
        self.row(module, f"{name}.o", (start * size, stop * size))

    def split_vocabulary(self, module: GPT) -> None:
        vocabulary, tied = self.case.model.vocabulary, self.case.model.has("tied")
        start, stop = self.tp.span(vocabulary)
        self.embedding(module, (start, stop))
        self.column(module, "head", (start, stop))
        if tied:
            module.head.weight = module.embedding.weight
        if hasattr(module, "extra_head"):
            self.column(module, "extra_head", (start, stop))
        module.vocabulary = VocabularyLosses(module.vocabulary.smoothing, self.tp, start, vocabulary)

    def split_sequence(self, module: GPT) -> None:
        """Between the layers, a part of each sequence is here: what acts there has a part of its gradient."""
        module.spread = self.scatter_sequence
        if module.dropout is not None:
            module.dropout.rows = self.rows_here
        for name in self.sequence_parameters(module):
            self.lay_partial(name)

    def sequence_parameters(self, module: nn.Module) -> list[str]:
        """Parameters that act on parts of sequences: norms, and biases that are added after a row-parallel sum."""
        biases = tuple(f"{row}.bias" for row in (".attention.o", ".mlp.down"))
        norms = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
        return [n for n in self.laid if n.endswith(biases + norms) or n in ("norm.weight", "norm.bias")]

    def rows_here(self, length: int) -> tuple[int, slice]:
        """The whole length, and the positions here, of which there are `length`."""
        return length * self.tp.size, slice(self.tp.index * length, (self.tp.index + 1) * length)

    # ------------------------------------------------------------------ what is shown of forward passes

    def mask_pieces(self, k: int) -> list[tuple[int, int]]:
        """Under sequence parallelism, dropout acts on this rank's positions."""
        return [self.tp.span(self.case.length(k))] if self.cuts("mask", "tp") else super().mask_pieces(k)

    def output_span(self) -> tuple[int, int, int] | None:
        vocabulary = self.case.model.vocabulary
        return (*self.tp.span(vocabulary), vocabulary) if self.cuts("output", "tp") else super().output_span()

    def cuts(self, kind: str, axis: str) -> bool:
        if axis != "tp" or self.tp.size == 1:
            return super().cuts(kind, axis)
        return self.sequence_parallel if kind == "mask" else self.case.model.decoder

    # ------------------------------------------------------------------ cutting one layer

    def column(
        self,
        module: nn.Module,
        name: str,
        span: tuple[int, int] | None = None,
        enter: Step | None = None,
        leave: Step | None = None,
    ) -> None:
        """Cut the outputs of a linear layer. enter, leave: what inputs and outputs pass (None: `self.enter`; nothing)."""
        layer = linear(module, name)
        span = span or self.tp.span(layer.weight.shape[0])
        weight = self.cut_parameter(f"{name}.weight", layer.weight, 0, span)
        bias = None if layer.bias is None else self.cut_parameter(f"{name}.bias", layer.bias, 0, span)
        module.set_submodule(name, ColumnLinear(weight, bias, enter or self.enter, leave or same))

    def row(self, module: nn.Module, name: str, span: tuple[int, int] | None = None, enter: Step | None = None) -> None:
        """Cut the inputs of a linear layer."""
        layer = linear(module, name)
        span = span or self.tp.span(layer.weight.shape[1])
        weight = self.cut_parameter(f"{name}.weight", layer.weight, 1, span)
        module.set_submodule(name, RowLinear(weight, layer.bias, enter or same, self.leave))

    def whole(self, module: nn.Module, name: str) -> None:
        """Keep all outputs of a linear layer, of which this rank uses some: its gradient is a part of a sum."""
        layer = linear(module, name)
        module.set_submodule(name, ColumnLinear(layer.weight, layer.bias, same, same))
        self.lay_partial(f"{name}.weight")
        self.lay_partial(f"{name}.bias")

    def embedding(self, module: GPT, span: tuple[int, int]) -> None:
        weight = self.cut_parameter("embedding.weight", module.embedding.weight, 0, span)
        module.set_submodule("embedding", VocabularyEmbedding(weight, span[0], self.total))

    def cut_parameter(self, name: str, parameter: Tensor, dim: int, span: tuple[int, int]) -> nn.Parameter:
        """The part of a parameter along a dimension, stored as the whole was (transposed or not), noted in `laid`."""
        box = tuple(span if d == dim else (0, n) for d, n in enumerate(parameter.shape))
        if name in self.laid:  # else tied to one that is
            self.lay(name, box=box, cut=self.laid[name].cut | {"tp"})
        part = parameter.detach().narrow(dim, span[0], span[1] - span[0]).clone()
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def lay_partial(self, name: str) -> None:
        """Note that each tensor rank has a part of this gradient's sum, if there is such a parameter."""
        if name in self.laid:
            self.lay(name, partial=("tp",))

    # ------------------------------------------------------------------ the collectives at the borders

    def enter(self, x: Tensor) -> Tensor:
        """From what stands between the layers into a column-parallel one."""
        return GatherForWork.apply(x, self.tp, 1) if self.sequence_parallel else Copy.apply(x, self.tp)

    def leave(self, x: Tensor) -> Tensor:
        """From a row-parallel layer to what stands between the layers."""
        return ReduceScatter.apply(x, self.tp, 1) if self.sequence_parallel else self.total(x)

    def total(self, x: Tensor) -> Tensor:
        return Reduce.apply(x, self.tp)

    def gather(self, x: Tensor) -> Tensor:
        """All outputs of a column-parallel layer, on every rank."""
        return Gather.apply(x, self.tp, -1)

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's inputs of a row-parallel layer."""
        return Scatter.apply(x, self.tp, -1)

    def scatter_sequence(self, x: Tensor) -> Tensor:
        """This rank's positions."""
        return Scatter.apply(x, self.tp, 1)


def linear(module: nn.Module, name: str) -> nn.Linear:
    """The linear layer of a name."""
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def same(x: Any) -> Any:
    """What needs no collective."""
    return x
