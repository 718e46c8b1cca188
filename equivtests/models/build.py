"""Building a model of a case with its canonical weights."""

from __future__ import annotations

import torch
from torch import nn

from equivtests.cases.case import Case
from equivtests.cases.parameters import initial, parameters
from equivtests.models.gpt import GPT
from equivtests.models.own import Own
from equivtests.models.parts import DropoutStream
from equivtests.models.plain import MLP, Chain, GatedMLP, Linear

FAMILIES: dict[str, type[nn.Module]] = {
    "chain": Chain,
    "linear": Linear,
    "mlp": MLP,
    "gated_mlp": GatedMLP,
    "gpt": GPT,
    "moe": GPT,
    "own": Own,
}

TERM_WEIGHTS = {"main": 1.0, "extra": 0.25, "z": 2.0**-6, "pairs": 2.0**-6, "balance": 2.0**-3}
"""Factor of each loss term in the objective."""

TERM_DENOMINATOR = {"main": "tokens", "extra": "tokens", "z": "rows", "pairs": "rows", "balance": "rows"}
"""What each loss term is averaged over in the whole window."""


def build(case: Case, device: str = "cpu") -> tuple[nn.Module, DropoutStream]:
    """The model of a case in the dtype of its weights, canonical weights loaded, and its dropout stream.

    A user's own module has the weights that it was built with.
    """
    stream = DropoutStream(case.seed)
    with torch.random.fork_rng(devices=[]):
        module = FAMILIES[case.model.family](case.model, stream)
    module.to(dtype=getattr(torch, case.precision.weights), device=device)
    if not case.model.own:
        load_canonical(case, module)
    return module, stream


def load_canonical(case: Case, module: nn.Module) -> None:
    """Copy the canonical weights into a module whose parameters bear the canonical names."""
    weights = initial(case)
    with torch.no_grad():
        for parameter in parameters(case.model):
            target = module.get_parameter(parameter.name)
            target.copy_(torch.from_numpy(weights[parameter.name]))
            target.requires_grad_(parameter.trained)
