"""Certified without running our code: exported cases, records that other programs write, and what such records lack."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CHECKOUT, Ended, Home, together
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save
from strategies import cases
from synthetic import CUTS, STRATEGY, record_of

from equivtests.cases import grid
from equivtests.cases.case import Case, Layout, Model, Optimizer, loads
from equivtests.cases.grid import named
from equivtests.cases.parameters import decays, initial, parameters
from equivtests.cases.split_grid import split_named
from equivtests.cases.windows import window_of
from equivtests.chapters.export import TERMS, export
from equivtests.chapters.records import read_record, write_record
from equivtests.cli import main
from equivtests.errors import CaseError
from equivtests.judge.check import Judgement, Verdict
from equivtests.judge.form import form_problems
from equivtests.judge.judge import judge
from equivtests.judge.ledger import ledger_input
from equivtests.models.build import TERM_DENOMINATOR, TERM_WEIGHTS
from equivtests.models.parts import DropoutStream
from equivtests.record.observation import Collective, Observation, Place, Record
from equivtests.record.serialize import rank_from_bytes
from equivtests.reference.expectation import expect
from equivtests.reference.ledger import EXPECTED

EXAMPLES = CHECKOUT / "docs" / "examples"
GRID_CASES = {line.name: line.make(line.worlds[0], 0) for line in grid.GRID}
SPLIT_NAMES = ("gpt-lengths-dp2-tp2", "moe-clip-dp4-ep2", "gpt-virtual-dp2-pp2v2", "gpt-dropout-cp4")
SPLIT_CASES = {name: case for name in SPLIT_NAMES if (case := split_named(name)) is not None}

# ---------------------------------------------------------------------------------------------- exported cases

Exported = Callable[[Case], Path]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    def directory(case: Case) -> Path:
        export(case, tmp_path / case.name)
        return tmp_path / case.name

    return directory


def fed(directory: Path) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """(update, data rank, micro-batch, what feed.json says of it with its arrays) of an exported case."""
    feed = json.loads((directory / "feed.json").read_text())
    arrays = [load_file(file) for file in sorted(directory.glob("feed-*.safetensors"))]
    assert len(arrays) == len({at["dp"] for at in feed["coordinates"]}) and len(feed["coordinates"]) == feed["world"]
    for window in feed["updates"]:
        for rank, batches in enumerate(window["ranks"]):
            for k, batch in enumerate(batches):
                said = {name: arrays[rank][value] if isinstance(value, str) else value for name, value in batch.items()}
                yield window["update"], rank, k, said


@pytest.mark.parametrize("name", GRID_CASES | SPLIT_CASES)
def test_an_exported_case_holds_what_the_ranks_of_the_suite_are_fed(exported: Exported, name: str) -> None:
    case = (GRID_CASES | SPLIT_CASES)[name]
    directory, places = exported(case), set()
    for update, rank, k, said in fed(directory):
        places.add((update, rank, k))
        batch = window_of(case, update, rank).microbatches[k]
        assert (said["rows"], said["tokens"], said["conditional"]) == (batch.rows, batch.tokens, batch.conditional)
        for key in ("inputs", "targets", "valid", "ids"):
            wanted = getattr(batch, key)
            assert said[key].dtype == (case.precision.weights if wanted.dtype.kind == "f" else wanted.dtype)
            assert np.array_equal(said[key], wanted), "the numbers have 24 bits: no cast rounds them"
    windows = [(u, r, k) for u, w in enumerate(case.windows) for r, micros in enumerate(w) for k in range(len(micros))]
    assert places == set(windows)


@pytest.mark.parametrize("name", GRID_CASES | SPLIT_CASES)
def test_an_exported_case_holds_the_model_and_what_every_update_is_made_of(exported: Exported, name: str) -> None:
    case = (GRID_CASES | SPLIT_CASES)[name]
    directory = exported(case)
    feed, weights = json.loads((directory / "feed.json").read_text()), load_file(directory / "initial.safetensors")
    assert loads((directory / "case.json").read_text()) == case
    assert weights.keys() == initial(case).keys()
    for key, value in initial(case).items():
        assert weights[key].dtype == case.precision.weights and np.array_equal(weights[key], value)
    listed = [(p["name"], tuple(p["shape"]), p["trained"]) for p in feed["parameters"]]
    assert listed == [(p.name, p.shape, p.trained) for p in parameters(case.model)]
    assert all(p["decays"] == (p["trained"] and decays(case, p["name"])) for p in feed["parameters"])
    for update, (window, step) in enumerate(zip(feed["updates"], expect(case, case.semantics).steps, strict=True)):
        assert (window["update"], window["skipped"], window["tokens"]) == (update, step.skipped, case.tokens(update))
        assert window["lr"] == (None if step.skipped else step.rate)
        assert window["rows"] == sum(len(rows) for rank in case.windows[update] for rows in rank)
        assert window["microbatches"] == max(map(len, case.windows[update]))


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_an_exported_case_says_where_every_rank_stands(exported: Exported, name: str) -> None:
    directory, layout = exported(SPLIT_CASES[name]), SPLIT_CASES[name].layout
    feed = json.loads((directory / "feed.json").read_text())
    for rank, at in enumerate(feed["coordinates"]):
        assert at["dp"] == layout.data_rank(rank) and at == {axis: layout.at(rank)[axis] for axis in at}
    assert feed["coordinates"][-1]["pp"] == layout.pp - 1
    assert 'the same "dp" in "coordinates" are fed the same' in (directory / "README.md").read_text()


def test_exported_loss_terms_are_those_of_the_models() -> None:
    assert {name: term["factor"] for name, term in TERMS.items()} == TERM_WEIGHTS
    assert {name: term["per"] for name, term in TERMS.items()} == TERM_DENOMINATOR


DROPOUT = (
    named("gpt-dropout-w4"),
    named("gpt-dropout-w4").replace(name="deep", model=Model("mlp", depth=2, features=("dropout",))),
    named("gpt-dropout-w4").replace(name="flat", model=Model("mlp", depth=1, features=("dropout",))),
    SPLIT_CASES["gpt-dropout-cp4"],
    SPLIT_CASES["moe-clip-dp4-ep2"],
)


@pytest.mark.parametrize("case", DROPOUT, ids=lambda case: case.name)
def test_exported_dropout_decisions_are_those_of_the_models(exported: Exported, case: Case) -> None:
    stream, kept = DropoutStream(case.seed), []
    for update, _, _, said in fed(exported(case)):
        stream.draw = update  # no window of the case is empty: every one of them makes an update
        mask = stream.mask(case.model.family, torch.from_numpy(said["ids"]), said["dropout"].shape[1:])
        assert np.array_equal(said["dropout"] * (4 / 3), mask.numpy())
        kept.append(said["dropout"])
    assert 0.7 < np.concatenate(kept).mean() < 0.8


def test_a_directory_in_use_is_not_exported_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for used in (tmp_path, tmp_path / "file"):
        with pytest.raises(CaseError, match="not an empty directory; name a new one"):
            export(named("linear-sgd-w2"), used)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_case_that_could_not_be_judged_is_not_exported(tmp_path: Path) -> None:
    """Clipping at a norm that a gradient has: rounding would decide."""
    case = named("linear-sgd-w2")
    limit = expect(case, case.semantics).steps[0].norm
    with pytest.raises(CaseError, match="at the clip threshold"):
        export(case.replace(optimizer=Optimizer(clip=limit)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("line", grid.GRID, ids=lambda line: line.name)
def test_a_case_of_the_grid_is_found_by_its_name(line: grid.Row) -> None:
    for world in line.worlds:
        assert named(f"{line.name}-w{world}") == line.make(world, 0)
        assert named(line.make(world, 7).name) == line.make(world, 7)


@pytest.mark.parametrize("name", ["linear-sgd", "linear-sgd-w0", "linear-sgd-w1000", "linear-w2", "-w2", ""])
def test_a_name_without_a_case_is_refused(name: str) -> None:
    with pytest.raises(CaseError, match=re.escape(f"no case {name!r}: write ROW-wWORLD")):
        named(name)


# --------------------------------------------------------------------------------------- what records lack

CASE = Case(
    "two",
    Model("mlp", depth=2, features=("bias",)),
    ((((3, 2), (1,)), ((1,), (4,))), (((1,), (5,)), ((4,), (2, 2)))),
    Layout(2),
    Optimizer("adamw", clip=0.125),
    accumulation=2,
)


@settings(max_examples=15)
@given(cases(), st.sampled_from(CUTS))
def test_a_complete_record_lacks_nothing(case: Case, cut: Any) -> None:
    assert form_problems(case, STRATEGY, record_of(case, cut)) == []


Change = Callable[[Observation], list[Observation]]


def lost(**wanted: Any) -> Change:
    """Observations with these values are not there."""
    return lambda o: [] if all(getattr(o, key) == value for key, value in wanted.items()) else [o]


def replaced(change: Callable[[Observation], dict[str, Any]], **wanted: Any) -> Change:
    """Observations with these values have others."""
    return lambda o: [o] if lost(**wanted)(o) else [dataclasses.replace(o, **change(o))]


def infinite(o: Observation) -> dict[str, Any]:
    return {"array": np.full_like(o.array, np.inf)}


BIAS = "layers.1.bias"
UNCOVERED = "2 of 3 elements shown by no rank (copy 0, ranks [1])"
SHAPE = "place.shape is (4,), but the whole parameter has shape (3,)"
LACKING: dict[str, tuple[Change, str]] = {
    "a kind": (lost(kind="lr"), "lr: never shown, though strategy synthetic promises it in `observes`"),
    "a mandatory kind": (lost(kind="loss"), "loss: never shown, though strategy synthetic promises it in `observes`"),
    "a kind of one update": (lost(kind="norm", update=1), "norm of update 1: shown by no rank"),
    "a counter": (lost(kind="step", update=2), "step after the last update (2): shown by no rank"),
    "an update": (lost(update=1), "update 1: nothing shown"),
    "the end": (lost(update=2), "update 2: nothing shown: show what the last update leaves with this number"),
    "a weight": (lost(kind="weight", name=BIAS, update=1), f"weight {BIAS} entering update 1: shown by no rank"),
    "a gradient": (lost(kind="gradient", name=BIAS, update=0), f"gradient {BIAS} of update 0: shown by no rank"),
    "all state": (lost(kind="state", update=1), "state entering update 1: shown by no rank"),
    "inputs": (lost(kind="inputs", rank=1, microbatch=1), "inputs of update 0: samples 4 shown by no rank"),
    "a part": (lost(kind="weight", name=BIAS, rank=0), f"weight {BIAS} entering update 0: {UNCOVERED}"),
    "a share": (lost(kind="loss", rank=1), "loss of update 0: a partial value needs all 2 ranks once"),
    "a number": (replaced(infinite, kind="norm"), "norm on rank 0 at update 0: not finite (NaN or infinity)"),
    "the shape": (
        replaced(lambda o: {"place": dataclasses.replace(o.place, shape=(4,))}, kind="gradient", name=BIAS, rank=0),
        f"gradient {BIAS} on rank 0 at update 0: {SHAPE}",
    ),
    "the name of a parameter": (
        replaced(lambda o: {"name": "module." + o.name}, kind="weight", name=BIAS),
        f"weight module.{BIAS} on rank 0 at update 0: the model has no such parameter; canonical names are ",
    ),
    "the name of a number": (
        replaced(lambda o: {"name": "train_loss"}, kind="loss"),
        "loss train_loss on rank 0 at update 0: its name is to be loss",
    ),
    "the shape of rows": (
        replaced(lambda o: {"array": o.array.reshape(-1)}, kind="inputs", microbatch=0, rank=0),
        "inputs on rank 0 at update 0: shape (80,), but what reached the forward pass has rows of shape (8, 5)",
    ),
}


def lacking(change: Change) -> Record:
    record = record_of(CASE, "flat")
    return dataclasses.replace(record, observations=[p for o in record.observations for p in change(o)])


def judged(case: Case, record: Record) -> Judgement:
    return judge(case, STRATEGY, record, expect(case, case.semantics))


@pytest.mark.parametrize("what", LACKING)
def test_what_a_record_lacks_is_named_and_fails(what: str) -> None:
    change, message = LACKING[what]
    record = lacking(change)
    problems = form_problems(CASE, STRATEGY, record)
    assert any(problem.startswith(message) for problem in problems), problems
    assert judged(CASE, record).verdict is not Verdict.PASS


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_record_of_which_something_is_missing_does_not_pass(data: st.DataObject) -> None:
    """Whatever is called a lack of form is a lack for the judge, too."""
    record = record_of(CASE, data.draw(st.sampled_from(CUTS)))
    gone = data.draw(st.sets(st.integers(0, len(record.observations) - 1), min_size=1, max_size=4))
    record.observations = [o for i, o in enumerate(record.observations) if i not in gone]
    if form_problems(CASE, STRATEGY, record):
        assert judged(CASE, record).verdict is not Verdict.PASS


def entering(key: str, array: np.ndarray) -> Change:
    """Another optimizer state of one parameter enters update 1, on every rank."""

    def there(o: Observation) -> dict[str, Any]:
        return {"array": array, "place": Place(array.shape, replica=o.rank)}

    return replaced(there, kind="state", name=f"{BIAS}/{key}", update=1)


UNUSABLE: dict[str, tuple[Change, str]] = {
    "a rate beyond all numbers": (replaced(lambda o: {"array": np.array(1e300)}, kind="lr"), "learning rate"),
    "a count of steps below zero": (entering("step", np.array(-1.0, np.float32)), "weight update"),
    "state of another shape": (entering("exp_avg", np.zeros(4, np.float32)), "weight update"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_what_no_optimizer_could_use_is_a_failure_and_no_crash(what: str) -> None:
    change, quantity = UNUSABLE[what]
    whole = record_of(CASE)
    restored = dataclasses.replace(whole, start=1, observations=[p for o in whole.observations for p in change(o)])
    judgement = judged(CASE, restored)
    assert judgement.first is not None and judgement.first.quantity == quantity
    assert any(check.detail.startswith("no step can be made from the state") for check in judgement.checks)


def test_copies_that_differ_are_for_the_judge() -> None:
    """A complete record of a wrong run is complete."""
    record = record_of(CASE)
    chosen = next(o for o in record.observations if o.kind == "weight" and o.update == 1 and o.rank == 1)
    chosen.array[...] += 1
    assert form_problems(CASE, STRATEGY, record) == []
    assert judged(CASE, record).verdict is Verdict.FAIL


def test_the_command_says_complete_lacking_or_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check-record", str(tmp_path)]
    write_record(tmp_path, CASE, STRATEGY, record_of(CASE))
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: complete, ")
    write_record(tmp_path, CASE, STRATEGY, lacking(lost(kind="lr", update=1)))
    assert main(command) == 1
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}: 1 to mend", "  lr of update 1: shown by no rank"]
    (tmp_path / "rank-1.json").write_text("entries")
    assert main(command) == 2
    assert "rank-1.json: not JSON" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- collectives in records


def with_collectives(times: int) -> tuple[Any, Record]:
    """A correct run whose ranks say that they all-reduced every gradient so many times."""
    strategy = dataclasses.replace(STRATEGY, algorithm="all-reduce")
    elements = sum(p.elements for p in EXPECTED["all-reduce"](ledger_input(CASE, strategy, 0)).values())
    issued = [Collective("all_reduce", (0, 1), elements, "float32", u) for u in (0, 1) for _ in range(times)]
    return strategy, dataclasses.replace(record_of(CASE), collectives={0: issued, 1: issued})


@pytest.mark.parametrize(("times", "status", "words"), [(1, 0, "PASS"), (3, 1, "it travelled 3 times")])
def test_collectives_of_a_record_are_judged_where_an_algorithm_is_declared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], times: int, status: int, words: str
) -> None:
    strategy, record = with_collectives(times)
    write_record(tmp_path, CASE, strategy, record)
    assert main(["judge", str(tmp_path)]) == status
    update, ledger = re.findall(r"^(?:PASS|FAIL) .*(?:\n  .*)*", capsys.readouterr().out, re.MULTILINE)
    assert update.startswith("PASS") and words in ledger


# -------------------------------------------------------------------------------------------- the examples


def torchrun(*words: str) -> tuple[str, ...]:
    script = str(EXAMPLES / "record_torch.py")
    return ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "case", *words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("foreign"))
    assert main(["export", str(home.directory / "case"), "--case", "gpt-adamw-w2"]) == 0
    yield home
    assert home.left() == []


@pytest.fixture(scope="module")
def ran(home: Home) -> dict[str, Ended]:
    """Plain DDP of somebody else's program, right and naive, and the suite's own adapter on the same case."""
    native = ("run", "case/case.json", "--strategy", "ddp-no-sync", "--keep-records", "kept", "--deadline", "120")
    return together(
        {
            "right": (home, torchrun("right")),
            "naive": (home, torchrun("naive", "--naive")),
            "native": (home, ("python", "-m", "equivtests", *native)),
        }
    )


def verdicts(directory: Path) -> dict[str, set[tuple[int, str, Verdict]]]:
    """By quantity: the verdict on every name at every update."""
    case, strategy, record = read_record(directory)
    found: dict[str, set[tuple[int, str, Verdict]]] = {}
    for check in judge(case, strategy, record, expect(case, case.semantics)).checks:
        found.setdefault(check.quantity, set()).add((check.update, check.name, check.verdict))
    return found


def test_a_record_of_plain_ddp_gets_the_verdicts_of_the_native_adapter(ran: dict[str, Ended], home: Home) -> None:
    for command in ("right", "native"):
        ran[command].ended_with(0)
    assert main(["check-record", str(home.directory / "right")]) == 0
    assert main(["judge", str(home.directory / "right")]) == 0
    mine = verdicts(home.directory / "right")
    native = verdicts(home.directory / "kept" / "ddp-no-sync-gpt-adamw-w2" / "record-0")
    shown = {"initial weights", "samples", "tokens", "loss", "gradient", "learning rate", "weight update"}
    assert mine.keys() == shown | {"optimizer state", "trajectory", "vacuity"}
    assert mine == {quantity: native[quantity] for quantity in mine}


def test_a_record_of_naive_ddp_fails_and_the_denominator_is_named(
    ran: dict[str, Ended], home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    ran["naive"].ended_with(0)
    assert main(["check-record", str(home.directory / "naive")]) == 0
    capsys.readouterr()
    assert main(["judge", str(home.directory / "naive")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].strip() == "my-ddp on gpt-adamw-w2: update 0: loss differs first"
    assert any(line.strip().startswith("the gradients are those of `denominator = rank-microbatch`") for line in lines)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("record_*.py")), ids=lambda path: path.name)
def test_programs_that_write_records_are_short_and_import_nothing_of_ours(script: Path) -> None:
    nodes = list(ast.walk(ast.parse(script.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert modules and not any(name.startswith("equivtests") for name in modules)
    assert len(script.read_text().splitlines()) < 120


SHAPES = {"inputs": (2, 8, 5), "weight": (3, 5), "gradient": (7,)}


def test_the_entries_in_the_document_are_read() -> None:
    """docs/records.md shows the entries of rank 1: copies, a share, a shard, and a collective."""
    text = (CHECKOUT / "docs" / "records.md").read_text()
    example = next(block for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE) if '"entries"' in block)
    entries = json.loads(example)["entries"]
    arrays = {e.get("array", str(i)): np.zeros(SHAPES.get(e["kind"], ()), np.float32) for i, e in enumerate(entries)}
    observations, collectives = rank_from_bytes(example, save(arrays), 1, 3)
    assert [(o.kind, o.name) for o in observations[:2]] == [("weight", "linear.weight"), ("inputs", "inputs")]
    assert [o.place for o in observations if o.kind != "inputs"] == [
        Place((3, 5), replica=1),
        Place((), replica=1),
        Place((), partial="sum"),
        Place((3, 5), interval=(8, 15)),
        Place((3, 5), replica=1),
    ]
    assert collectives == [Collective("all_reduce", (0, 1), 15, "float32", 0)]
