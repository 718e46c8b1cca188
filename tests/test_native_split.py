"""What torch's own strategies for split models are handed: stages, plans of styles, batches of equal micro-batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import PrepareModuleInput

from equivtests.adapters.native.pipeline import fill_up
from equivtests.adapters.native.plan import GptPlan, kv_heads, plain_plan, use_own_heads
from equivtests.adapters.native.stages import Stage
from equivtests.cases.case import DOUBLE, Case, Layout, Model
from equivtests.cases.parameters import parameters
from equivtests.cases.windows import Feed, MicroBatch
from equivtests.models.build import build
from equivtests.models.gpt import GPT, Attention
from equivtests.models.staged import Staged

DEEP = Model("gpt", width=8, depth=4, features=("bias", "extra_head", "z_loss"))
STAGED = (DEEP, Model("mlp", width=6, depth=4, features=("bias",)), Model("chain", depth=4))
CUTS = ((0, 2, 4), (0, 0, 1, 1, 4))
WIDE = ("bias", "extra_head", "gated", "qk_norm", "smoothing")


def case_of(model: Model) -> Case:
    return Case("stages", model, ((((3, 8), (5, 0)),),), Layout(dp=1), precision=DOUBLE, accumulation=2)


def stages_of(model: Model, cuts: tuple[int, ...]) -> tuple[nn.Module, list[Stage]]:
    module, _ = build(case_of(model))
    assert isinstance(module, Staged)
    last = len(cuts) - 2
    return module, [Stage(module, range(a, b), i == 0, i == last) for i, (a, b) in enumerate(pairwise(cuts))]


def arguments(batch: MicroBatch) -> dict[str, Tensor]:
    fields = {name: torch.from_numpy(getattr(batch, name)) for name in ("inputs", "targets", "valid", "ids")}
    return fields | {"valid": fields["valid"].double()}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("model", STAGED, ids=lambda model: model.family)
def test_stages_hold_every_parameter_once_under_its_canonical_name(model: Model, cuts: tuple[int, ...]) -> None:
    """A wrapper around a stage sees the stage's parameters: a foreign one would be reduced by ranks that never use it."""
    _, stages = stages_of(model, cuts)
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(held) == sorted(p.name for p in parameters(model))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("model", STAGED, ids=lambda model: model.family)
def test_stages_in_a_row_are_the_whole_model(model: Model, cuts: tuple[int, ...]) -> None:
    module, stages = stages_of(model, cuts)
    batch = next(iter(Feed(case_of(model), 0))).microbatches[0]
    fields = arguments(batch)
    x = fields["inputs"]
    for stage in stages:
        x = stage(x, **fields)
    terms = module(*fields.values(), False)
    assert stages[-1].terms == tuple(terms)
    assert torch.equal(x, torch.stack(list(terms.values())))


def test_what_is_filled_up_is_zero_and_stands_behind() -> None:
    array = np.arange(1, 7).reshape(2, 3)
    filled = fill_up(array, (3, 4))
    assert np.array_equal(filled[:2, :3], array)
    assert filled.shape == (3, 4) and filled.sum() == array.sum()
    assert fill_up(array, (2,)).shape == (2, 3)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("heads", "kv", "ranks"), [(4, 4, 2), (4, 2, 4), (4, 1, 2), (3, 3, 2)])
def test_every_layer_with_parameters_has_a_style(heads: int, kv: int, ranks: int, sequence: bool) -> None:
    """A parameter that is left a plain tensor is one that nobody reduces, and that clipping cannot take."""
    module, _ = build(case_of(Model("gpt", width=12, heads=heads, kv_heads=kv, vocabulary=13, features=WIDE)))
    assert isinstance(module, GPT)
    plan = GptPlan(module, ranks, sequence, loss=sequence).plan()
    styled = {name for name, style in plan.items() if not isinstance(style, PrepareModuleInput)}
    assert styled == {name for name, part in module.named_modules() if list(part.parameters(recurse=False))}


@pytest.mark.parametrize("family", ["linear", "mlp", "gated_mlp"])
def test_plain_models_have_a_style_for_every_layer(family: str) -> None:
    module, _ = build(case_of(Model(family, depth=3)))  # type: ignore[arg-type]
    assert set(plain_plan(module)) == {n for n, part in module.named_modules() if isinstance(part, nn.Linear)}


@pytest.mark.parametrize(("heads", "kv", "ranks"), [(4, 4, 2), (4, 4, 4), (4, 2, 2), (4, 2, 4), (4, 1, 2), (3, 3, 2)])
def test_query_heads_use_the_keys_that_they_use_on_one_device(heads: int, kv: int, ranks: int) -> None:
    """Each rank numbers the keys that are here: all of them where they cannot be cut, else its own from 0."""
    module, _ = build(case_of(Model("gpt", width=12, heads=heads, kv_heads=kv)))
    whole = next(part for part in module.modules() if isinstance(part, Attention))
    wanted, cut = list(whole.kv_of), heads % ranks == 0 and kv_heads(whole) % ranks == 0
    used: list[int] = []
    for rank in range(ranks):
        whole.kv_of = list(wanted)
        use_own_heads(whole, rank, ranks)
        used += [head + rank * kv // ranks if cut else head for head in whole.kv_of]
    assert used == (wanted if heads % ranks == 0 else wanted * ranks)
