"""A staged model as the layers that DeepSpeed's PipelineModule takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from equivtests.adapters.native.stages import BEGINNING, own_layers
from equivtests.models.staged import Staged


class Part(nn.Module):
    """Some of a model's parts, under the names that they have there, and what is done with what the part before gave."""

    def __init__(self, parts: dict[str, nn.Module], run: Callable[[Any], Any]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, given: Any) -> Any:
        return self.run(given)


class Tied(nn.Module):
    """The weight of an embedding that is also the head; stages that have it add up its gradients."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight


class Layers(Part):
    """The layers of one stage; DeepSpeed is told to cut between parts of this class."""


def parts_of(whole: Staged, stages: tuple[range, ...], tokens: bool, tied: bool) -> list[Any]:
    """The beginning, the layers of every stage, and the end.

    From part to part goes the hidden state, and behind it the inputs if they are tokens: layers look for the ends of
    documents in them. The last one gives the hidden state alone: the end of the model is the loss function's.
    """

    def begin(given: tuple[Tensor, Tensor]) -> Any:
        x = whole.begin(*given)
        return (x, given[0]) if tokens else x

    def run(layers: range, given: Any) -> Any:
        x, inputs = given if tokens else (given, given)
        for i in layers:
            x = whole.layer(i, x, inputs)
        return (x, inputs) if tokens else x

    children = {name: part for name, part in whole.named_children() if name != whole.stack}
    lent = {"embedding", "head"} if tied else set()  # they come with the two specifications of a tied layer
    first = {name: part for name, part in children.items() if name in BEGINNING and name not in lent}
    last = {name: part for name, part in children.items() if name not in BEGINNING and name not in lent}
    stack = whole.get_submodule(whole.stack)
    middle = [Layers({whole.stack: own_layers(stack, layers)}, partial(run, layers)) for layers in stages]
    ends = [Part(first, begin), *middle, Part(last, lambda given: given[0] if tokens else given)]
    if not tied:
        return ends
    tie = TiedLayerSpec("embedding", Tied, whole.embedding, forward_fn=lambda tied, given: given)
    return [tie, *ends, tie]
