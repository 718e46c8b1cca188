"""A model of the user's own: its module is the reference, all else is still the suite's, and every output says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CHECKOUT, Ended, Home, together
from own_models import REFUSED, Good

from equivtests.cases.case import Case, Layout, Model, dumps
from equivtests.cases.fixture import Fixture
from equivtests.cases.fixture import dumps as fixture_text
from equivtests.cases.grid import UNEQUAL, cases, own_grid, scaled
from equivtests.cases.parameters import initial, parameters
from equivtests.cases.windows import decode_ids, window_of
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of, plan, use_model
from equivtests.chapters.records import write_record
from equivtests.chapters.run import Chapter, Result, Run
from equivtests.cli import main
from equivtests.errors import ModelError
from equivtests.judge.check import Verdict
from equivtests.own import UNKNOWN, Loaded, claim, loaded
from equivtests.ranks.job import Job
from equivtests.ranks.loading import load_model
from equivtests.ranks.pools import Pools
from equivtests.reference.expectation import canonical_weights, expect
from equivtests.reference.own import examine, rounds_inside
from equivtests.reference.update import gradients

EXAMPLES = CHECKOUT / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

GOOD, READER, ROUNDS, BY_RANK, UNITS = (
    use_model(spec).spec
    for spec in (
        "own_models:Good",
        "my_model:MyModel",
        "own_models:RoundsInside",
        "own_models:ByRank",
        "own_models:Units",
    )
)
MODELS = (GOOD, READER, UNITS)


def named(spec: str, name: str) -> Case:
    """A case of the grid of a model."""
    model = loaded(spec).model
    grid = own_grid(spec, model.length, model.learning_rate)
    return next(case for case in cases("nightly", 4, 0, grid) if case.name == name)


# ---------------------------------------------------------------------------------------------- what may serve


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_a_model_that_cannot_serve_as_a_reference_is_refused_in_one_line(model: type[Good]) -> None:
    with pytest.raises(ModelError) as refusal:
        examine(Loaded("mine:Model", model()))
    assert REFUSED[model] in str(refusal.value)
    assert str(refusal.value).startswith("model mine:Model: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("spec", MODELS)
def test_a_correct_model_is_a_truth_in_float64(spec: str) -> None:
    assert loaded(spec).double and not rounds_inside(loaded(spec))
    assert "partly in float32" not in claim(spec)


def test_a_model_that_rounds_inside_is_no_truth_for_float64_and_its_claim_says_so() -> None:
    assert "partly in float32" in claim(ROUNDS)
    found = plan(model=ROUNDS, strategies=("dp",))
    assert not [run for run in found.runs if run.case.precision.weights == "float64"]
    reasons = {left.case: left.reason for left in found.not_claimed}
    assert reasons["own-momentum-double-w4"] == "precision float64: the model rounds to less inside"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("own_models", "model 'own_models': expected 'package.module:Class', such as 'my_project.certify:MyOwnModel'"),
        ("own_models:Nowhere", "module own_models has no 'Nowhere'; models there: BatchNorm, ByRank, "),
        ("own_models:Curve", "Curve is no subclass of OwnModel; models there: "),
        ("nowhere_models:Good", "cannot import nowhere_models: ModuleNotFoundError"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(spec: str, words: str) -> None:
    with pytest.raises(ModelError) as refusal:
        load_model(spec)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


# ---------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("spec", MODELS)
def test_the_reference_is_the_users_module_on_the_whole_window_as_one_batch(spec: str) -> None:
    """Written out with nothing but the module: build, double, one batch, one division, one backward pass."""
    case, own = named(spec, "own-sgd-w4"), loaded(spec)
    fed = [b for rank in range(4) for b in window_of(case, 0, rank).microbatches]
    inputs, targets, valid = (
        torch.from_numpy(np.concatenate([getattr(b, part) for b in fed])) for part in ("inputs", "targets", "valid")
    )
    module = own.model.build().double()
    loss = own.model.losses(module, inputs, targets, valid).sum() / valid.sum()
    loss.backward()
    found = gradients(case, case.semantics, 0, 0, canonical_weights(case))
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    held = {f"model.{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert found.values.keys() == held.keys()
    for name, gradient in held.items():
        torch.testing.assert_close(found.values[name], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("spec", MODELS)
def test_names_shapes_and_first_weights_are_those_of_build(spec: str) -> None:
    case, module = named(spec, "own-sgd-w4"), loaded(spec).model.build()
    built = {f"model.{name}": parameter for name, parameter in module.named_parameters()}
    assert [(p.name, p.shape, p.trained) for p in parameters(case.model)] == [
        (name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in built.items()
    ]
    for name, value in initial(case).items():
        assert np.array_equal(value, built[name].detach().double().numpy())


def test_the_reference_itself_moves_the_weights_and_clips() -> None:
    expected = expect(named(READER, "own-ragged-clip-w4"), named(READER, "own-ragged-clip-w4").semantics)
    assert all(step.coefficient < 0.5 for step in expected.steps)
    moved = sum(float((expected.weights[1][n] - w).norm()) ** 2 for n, w in expected.weights[0].items()) ** 0.5
    assert moved == pytest.approx(loaded(READER).model.learning_rate, rel=1e-2)


@pytest.mark.parametrize("spec", MODELS)
def test_samples_are_recognized_by_what_reached_the_module(spec: str) -> None:
    model = Model("own", own=spec, length=loaded(spec).model.length)
    rows = np.stack([loaded(spec).sample(number)[0] for number in (7, 0, 168)])
    dtypes = (np.float32, np.float64) if rows.dtype.kind == "f" else (np.int64, np.int32)
    for dtype in dtypes:
        assert decode_ids(model, rows.astype(dtype)).tolist() == [7, 0, 168]
    assert decode_ids(model, rows + 1).tolist() == [UNKNOWN] * 3


@pytest.mark.parametrize("length", [1, 8, 12])
def test_windows_follow_the_length_of_the_users_samples(length: int) -> None:
    made, counts = scaled(UNEQUAL, length), [n for w in UNEQUAL for r in w for m in r for n in m]
    found = [n for w in made for r in w for m in r for n in m]
    assert max(found) == length and [n > 0 for n in found] == [n > 0 for n in counts]
    assert length != 8 or made == UNEQUAL


# ---------------------------------------------------------------------------------------------- verdicts


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(4, deadline=120.0)) as standing:
        yield standing


def result(pools: Pools, spec: str, adapter: str, strategy: str, name: str, chapter: Chapter = "update") -> Result:
    claimed = next(s for s in claims_of(adapter).strategies if s.name == strategy)
    case = named(spec, name)
    assert claimed.refusal(case) is None
    return certify(pools, Run(chapter, adapter, claimed, case), confirm=False)


CORRECT = {
    "dp": "equivtests.adapters.textbook.dp:DataParallel",
    "zero-3": "equivtests.adapters.textbook.zero:Zero3",
    "ddp-no-sync": "equivtests.adapters.native.ddp:DDP",
    "fsdp1-full": "equivtests.adapters.native.fsdp1:FSDP1",
    "fsdp2": "equivtests.adapters.native.fsdp2:FSDP2",
}


@pytest.mark.parametrize("strategy", CORRECT)
@pytest.mark.parametrize("spec", MODELS)
def test_correct_strategies_pass_and_every_verdict_says_that_its_claim_is_weaker(
    pools: Pools, spec: str, strategy: str
) -> None:
    found = result(pools, spec, CORRECT[strategy], strategy, "own-adamw-w4", "restore")
    assert found.verdict is Verdict.PASS, found.explanation
    assert [line.strip() for line in found.explanation] == [claim(spec)]
    assert claim(spec).startswith(f"weaker claim: the reference is {spec} itself")


MUTANTS = "equivtests.mutants"
REJECTED = (
    (f"{MUTANTS}.loss:MeanOfMeans", "dp", "own-sgd-w4", "loss"),
    (f"{MUTANTS}.loss:LocalMean", "dp", "own-sgd-w4", "gradient"),
    (f"{MUTANTS}.ddp:FirstNotReduced", "dp", "own-sgd-w4", "gradient"),
    (f"{MUTANTS}.ddp:StepsWhenReduced", "dp", "own-sgd-w4", "loss"),
    (f"{MUTANTS}.loss:DroppedTail", "dp", "own-sgd-w4", "weight update"),
    (f"{MUTANTS}.zero:DecayByLocalShape", "fsdp1-full", "own-adamw-w4", "weight update"),
    (f"{MUTANTS}.norms:LocalNorm", "zero-3", "own-ragged-clip-w4", "norm"),
    ("own_models:FeedsRounded", "dp", "own-sgd-w4", "samples"),
    ("own_models:ForgetsBuffers", "dp", "own-sgd-w4", "initial weights"),
    ("own_models:DriftingBuffers", "dp", "own-sgd-w4", "buffer"),
)
"""Adapter with one mistake, its strategy, a case, the quantity that must differ first."""


@pytest.mark.parametrize(("adapter", "strategy", "name", "quantity"), REJECTED)
def test_mistakes_are_found_with_the_users_model_too(
    pools: Pools, adapter: str, strategy: str, name: str, quantity: str
) -> None:
    found = result(pools, GOOD, adapter, strategy, name)
    assert (found.verdict, found.first and found.first.quantity) == (Verdict.FAIL, quantity), found.explanation
    assert found.explanation[-1].strip() == claim(GOOD)
    assert f"--model {GOOD} " in found.explanation[-2]


def test_a_checkpoint_of_the_wrong_moment_is_found(pools: Pools) -> None:
    found = result(pools, GOOD, f"{MUTANTS}.restore:FirstCheckpointRepeated", "dp", "own-adamw-w4", "restore")
    assert found.first is not None and found.first.quantity == "restored weights"


def test_first_weights_that_depend_on_the_rank_are_found(pools: Pools) -> None:
    found = result(pools, BY_RANK, CORRECT["dp"], "dp", "own-sgd-w4")
    assert found.first is not None and found.first.quantity == "initial weights", found.explanation
    assert "ranks disagree" in found.explanation[1]


def test_an_adapter_that_writes_the_suites_models_itself_claims_no_other() -> None:
    (strategy,) = claims_of("my_numpy:MyNumpy").strategies
    assert strategy.refusal(named(GOOD, "own-sgd-w1")) == "model own"
    (strategy,) = claims_of("own_models:FromScratch").strategies
    assert strategy.refusal(named(GOOD, "own-sgd-w1")) == "model own"


# ---------------------------------------------------------------------------------------------- what files may do

MARKS = """
from pathlib import Path

Path("imported").touch()
"""
STRANGE = Case("strange", Model("own", own="stranger:Model"), (((((3, 1),)),),), Layout(1))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", stranger=MARKS)


def fixture_of(case: Case) -> Fixture:
    return Fixture("odd", "none", "none", "update", CORRECT["dp"], CORRECT["dp"], "dp", "loss", case)


def record_of(case: Case, directory: Path, pools: Pools) -> None:
    """A record of a loaded model, which then names a stranger's."""
    found = result(pools, GOOD, CORRECT["dp"], "dp", "own-sgd-w1")
    write_record(directory, case, found.run.strategy, found.records[0])


@pytest.mark.parametrize("command", ["run", "reproduce", "judge", "shrink"])
def test_no_file_makes_the_suite_import_what_it_names(home: Home, pools: Pools, command: str) -> None:
    texts = {"run": dumps(STRANGE), "shrink": dumps(STRANGE), "reproduce": fixture_text(fixture_of(STRANGE))}
    if command == "judge":
        record_of(
            STRANGE.replace(windows=named(GOOD, "own-sgd-w1").windows, accumulation=8), home.directory / "x", pools
        )
    else:
        (home.directory / "x").write_text(texts[command])
    more = ("smaller.json", "--strategy", "dp") if command == "shrink" else ()
    line = home.run("python", "-m", "equivtests", command, "x", *more).refused_in_one_line(2)
    assert line.endswith("is not imported unasked: if you trust it, add --model stranger:Model")
    assert not (home.directory / "imported").exists()


def test_a_record_is_judged_where_the_command_line_names_the_model(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_of(named(GOOD, "own-sgd-w1"), tmp_path, pools)
    assert main(["judge", str(tmp_path), "--model", GOOD]) == 0
    verdict, claimed = capsys.readouterr().out.splitlines()
    assert verdict.startswith("PASS ") and claimed.strip() == claim(GOOD)


def test_ranks_are_asked_only_for_models_that_the_command_line_named() -> None:
    with pytest.raises(ModelError, match="add --model stranger:Model"):
        Job(CORRECT["dp"], "dp", STRANGE)


# ---------------------------------------------------------------------------------------------- commands

SUITE = ("python", "-m", "pytest", "--pyargs", "equivtests", "--nproc", "2", "--model", "my_model:MyModel")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Home, Ended]]:
    homes, code = {}, (EXAMPLES / "my_model.py").read_text()
    commands = {
        "passing": (*SUITE, "--tier", "quick", "--strategy", "dp"),
        "failing": (*SUITE, "--tier", "quick", "--adapter", "broken:Broken", "-k", "own-adamw-w2 and update"),
        "refused": (*SUITE[:-1], "my_model:Reader"),
        "case": ("python", "-m", "equivtests", "run", "case.json", "--strategy", "dp", "--model", "my_model:MyModel"),
    }
    for name in commands:
        homes[name] = home = Home(tmp_path_factory.mktemp("own"), my_model=code, broken=BROKEN)
        home.environment = home.environment | {"GITHUB_STEP_SUMMARY": str(home.directory / "summary.md")}
        (home.directory / "case.json").write_text(dumps(named(READER, "own-adamw-w2")))
    ended = together({name: (homes[name], words) for name, words in commands.items()})
    return {name: (homes[name], ended[name]) for name in commands}


BROKEN = """
from equivtests.mutants.loss import MeanOfMeans


class Broken(MeanOfMeans):
    pass
"""
WEAKER = (
    "weaker claim: the reference is my_model:MyModel itself on one device; "
    "a mistake in its own code stands on both sides"
)


def certificate(home: Home) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((home.directory / "equivtests-certificate.json").read_text())
    return data


def test_a_passing_run_says_that_its_claim_is_weaker(shown: dict[str, tuple[Home, Ended]]) -> None:
    home, ended = shown["passing"]
    ended.ended_with(0)
    assert ended.line("weaker claim") == WEAKER
    assert ended.line("certificate of the weaker claim").endswith(": equivtests-certificate.json")
    assert f"claim: {WEAKER}" in (home.directory / "summary.md").read_text()
    data = certificate(home)
    assert data["complete"] and data["claim"] == WEAKER and data["selection"]["model"] == "my_model:MyModel"
    assert data["runs"] and all(run["case"].startswith("own-") for run in data["runs"])
    assert all(WEAKER in run["explanation"][-1] for run in data["runs"])


def test_a_failing_run_says_so_too_and_can_be_repeated(shown: dict[str, tuple[Home, Ended]]) -> None:
    home, ended = shown["failing"]
    ended.ended_with(1)
    assert "update 0: loss differs first" in ended.output and f"  {WEAKER}" in ended.lines
    assert certificate(home)["claim"] == WEAKER and not certificate(home)["complete"]
    assert "--adapter broken:Broken --model my_model:MyModel --pyargs equivtests" in ended.line("reproduce")


def test_a_class_that_is_no_model_ends_in_one_line(shown: dict[str, tuple[Home, Ended]]) -> None:
    line = shown["refused"][1].refused_in_one_line(4)
    assert line == "ERROR: model 'my_model:Reader': Reader is no subclass of OwnModel; models there: MyModel"


def test_a_case_file_of_the_users_model_runs_where_the_command_line_names_the_model(
    shown: dict[str, tuple[Home, Ended]],
) -> None:
    ended = shown["case"][1].ended_with(0)
    assert ended.line("PASS").startswith("PASS         dp-own-adamw-w2") and ended.line("weaker claim") == WEAKER


def test_the_page_shows_the_example_as_it_stands() -> None:
    lines = (EXAMPLES / "my_model.py").read_text().splitlines()
    indented = "\n".join(f"    {line}" if line else "" for line in lines)
    assert indented in (CHECKOUT / "docs" / "own-model.md").read_text()
