"""`python -m equivtests …` as users run it: output, exit status, and one line for all that it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator

import pytest
from commands import Ended, Home, together

from equivtests import __version__
from equivtests.cases.case import Case, Layout, dumps, loads
from equivtests.cases.fixture import Fixture
from equivtests.cases.fixture import dumps as fixture_text
from equivtests.cases.grid import GRID
from equivtests.cases.split_grid import SPLIT_GRID, split_named
from equivtests.cli import main
from equivtests.cli.runs import chapter_refusal
from equivtests.explain.shrink import shrink
from equivtests.judge.check import QUANTITIES
from equivtests.mutants.kill import planted, strategy_of
from equivtests.mutants.situations import TWO_BY_THREE

EQUIVTESTS = ("python", "-m", "equivtests")
MUTANT = next(m for m in planted(2) if m.name == "hf-ddp-local-count")
FIXTURE = Fixture(
    MUTANT.name,
    MUTANT.mistake,
    MUTANT.source,
    MUTANT.chapter,
    MUTANT.adapter,
    MUTANT.parent,
    MUTANT.strategy,
    MUTANT.quantity,
    MUTANT.case,
)

OWN = '''
from equivtests.adapters.adapter import MANDATORY, Adapter, Claims, Strategy
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.record.observation import Place


class Right(DataParallel):
    def claims(self):
        return Claims((Strategy("right"),))


class Wrong(DataParallel):
    """Divides by the tokens of the rank."""

    def claims(self):
        return Claims((Strategy("wrong"),))

    def token_factor(self, span, k, batch):
        return 1 / max(1, sum(b.tokens for b in self.window.microbatches))


class Broken(DataParallel):
    """Every strategy is broken in the way that it is named after; they are tried on two ranks."""

    def claims(self):
        names = ("transposed", "renamed", "left-out", "infinite", "raising", "differing", "fine")
        mlp, two = frozenset({"mlp"}), frozenset({2})
        strategies = [Strategy(name, worlds=two, families=mlp) for name in names]
        strategies.append(Strategy("unsaved", worlds=two, families=mlp, restores=True))
        strategies.append(Strategy("silent", worlds=two, families=mlp, observes=MANDATORY | {"lr"}))
        strategies.append(Strategy("elsewhere", worlds=frozenset({4})))
        return Claims(tuple(strategies))

    def shown(self):
        shown = list(super().shown())
        name, parameter, place = shown[0]
        if self.strategy == "transposed":
            shown[0] = name, parameter, Place(place.shape[::-1], replica=place.replica)
        if self.strategy == "renamed":
            shown[0] = f"module.{name}", parameter, place
        return shown[1:] if self.strategy == "left-out" else shown

    def advance(self, observe):
        super().advance((lambda *a, **k: None) if self.strategy == "silent" else observe)

    def decays(self, name, tensor):
        return True

    def optimizer_step(self):
        super().optimizer_step()
        if self.strategy == "infinite":
            next(self.module.parameters()).data.fill_(float("nan"))
        if self.strategy == "raising" and self.ranks.rank == 1:
            raise RuntimeError("no kernel for this")

    def token_factor(self, span, k, batch):
        return super().token_factor(span, k, batch) * (2 if self.strategy == "differing" else 1)

    def save_tensors(self, directory):
        raise TypeError("save_tensors() is not written")


class NotAnAdapter:
    pass


class NoClaims(Adapter):
    pass


class Claiming(Adapter):
    def claims(self):
        return self.claimed()


class AList(Claiming):
    claimed = lambda self: [Strategy("a")]


class NoTuple(Claiming):
    claimed = lambda self: Claims(Strategy("a"))


class NoStrategy(Claiming):
    claimed = lambda self: Claims(())


class Twice(Claiming):
    claimed = lambda self: Claims((Strategy("a"), Strategy("a")))


class Spaced(Claiming):
    claimed = lambda self: Claims((Strategy("my dp"),))


class SetAsList(Claiming):
    claimed = lambda self: Claims((Strategy("a", families=["mlp"]),))


class Isolated(Claiming):
    claimed = lambda self: Claims((Strategy("a"),), isolation="cases")


class Misfit(Claiming):
    claimed = lambda self: Claims((Strategy("a", algorithm="magic"),))


class Arguments(Adapter):
    def __init__(self, model):
        pass
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A repository with adapters, cases and a fixture; commands must leave nothing running."""
    home = Home(tmp_path_factory.mktemp("home"), own=OWN, unimportable="import framework_that_is_not_there\n")
    texts = {
        "case.json": dumps(TWO_BY_THREE),
        "one-update.json": dumps(TWO_BY_THREE.replace(windows=TWO_BY_THREE.windows[:1])),
        "fixture.json": fixture_text(FIXTURE),
        "no-mistake.json": fixture_text(dataclasses.replace(FIXTURE, faulty=FIXTURE.correct)),
        "misspelled.json": dumps(TWO_BY_THREE).replace('"magnitude"', '"magnitud"'),
        "text.json": "a case",
        "fixture-text.json": "{}",
    }
    for name, text in texts.items():
        (home.directory / name).write_text(text)
    (home.directory / "bytes.json").write_bytes(b"\xff\xfe\x00")
    yield home
    assert home.left() == []


Ran = dict[str, Ended]


@pytest.fixture(scope="module")
def ran(home: Home) -> Ran:
    """The commands whose results the tests below look at."""
    words = {
        "list": "list",
        "doctor": "doctor",
        "run": "run case.json --strategy dp --keep-records kept",
        "run wrong": "run case.json --adapter own:Wrong --deadline 60",
        "run misspelled": "run misspelled.json",
        "reproduce": "reproduce fixture.json",
        "reproduce no mistake": "reproduce no-mistake.json",
        "reproduce right": "reproduce fixture.json --adapter own:Right",
        "reproduce wrong": "reproduce fixture.json --adapter own:Wrong",
        "shrink": "shrink case.json smaller.json --adapter own:Wrong",
        "check right": "adapter-check own:Right",
        "check broken": "adapter-check own:Broken",
        "check unimportable": "adapter-check unimportable:X",
    }
    return together({name: (home, (*EQUIVTESTS, *line.split())) for name, line in words.items()})


Refused = Callable[..., str]


@pytest.fixture
def refused(home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The message of a command that must refuse its input with one line and status 2, run in this process."""

    def message(*words: str) -> str:
        monkeypatch.chdir(home.directory)
        monkeypatch.syspath_prepend(home.directory)
        capsys.readouterr()
        assert main(words) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.startswith("equivtests: ") and output.err.count("\n") == 1
        return output.err.removeprefix("equivtests: ").strip()

    return message


# ---------------------------------------------------------------------------------------------- list, doctor


def test_list_shows_every_strategy_case_and_quantity(ran: Ran) -> None:
    words = {line.split()[0] for line in ran["list"].ended_with(0).lines if line}
    assert words >= {"dp", "zero-3", "ddp", "fsdp1-full", "fsdp2"} | {row.name for row in GRID + SPLIT_GRID}
    assert ran["list"].lines[-len(QUANTITIES) :] == [f"  {quantity}" for quantity in QUANTITIES]


def test_list_shows_axes_schedules_and_layouts_of_models_that_are_split(ran: Ran) -> None:
    lines = [line.strip() for line in ran["list"].lines]
    assert lines[lines.index("interleaved-1f1b   equivtests.adapters.textbook.pipeline:PipelineParallel") + 2] == (
        "axes: dp, pp; schedule: interleaved-1f1b"
    )
    for row in SPLIT_GRID:
        assert f"{row.name:24} {row.tier:8} {row.why}" in lines and ", ".join(row.layouts + row.more) in lines


def test_doctor_tells_versions_and_what_this_machine_can_run(ran: Ran) -> None:
    lines = ran["doctor"].ended_with(0).lines
    assert lines[0] == f"equivtests {__version__}"
    assert {"python", "torch", "numpy", "cores", "backends", "GPUs", "can"} <= {line.split()[0] for line in lines}
    assert ran["doctor"].line("can run").endswith("pytest --nproc 4 equivtests/")


# ---------------------------------------------------------------------------------------------- run, judge


def test_a_case_that_passes_shows_its_worst_ratios(ran: Ran) -> None:
    assert re.fullmatch(
        r"PASS +dp-two-by-three +\(worst ratios: loss \S+, gradient \S+, weight update 0, trajectory \S+\)\n",
        ran["run"].ended_with(0).output,
    )


def test_a_case_that_fails_is_explained_with_the_command_that_repeats_it(ran: Ran) -> None:
    lines = ran["run wrong"].ended_with(1).lines
    assert lines[0].startswith("FAIL         wrong-two-by-three  (worst ratios: ")
    assert lines[1].strip() == "wrong on two-by-three: update 0: loss differs first"
    assert any("`denominator = rank`" in line for line in lines)
    command = "reproduce: python -m equivtests run case.json --adapter own:Wrong --deadline 60.0 --strategy wrong"
    assert lines[-1].strip() == command


def test_a_kept_record_is_judged_without_ranks_and_its_damage_is_told(ran: Ran, home: Home, refused: Refused) -> None:
    ran["run"].ended_with(0)
    record = home.directory / "kept" / "dp-two-by-three" / "record-0"
    assert main(["judge", str(record)]) == 0
    arrays = record / "rank-1.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-8])
    assert "rank-1.safetensors" in refused("judge", str(record))
    arrays.unlink()
    assert "rank-1.safetensors" in refused("judge", str(record))
    (record / "record.json").write_text("{}")
    assert "record.json: field " in refused("judge", str(record))
    assert "record.json cannot be read" in refused("judge", "nowhere")


def test_a_malformed_case_is_refused_by_the_command_in_one_line(ran: Ran) -> None:
    message = ran["run misspelled"].refused_in_one_line(2)
    assert message.startswith("equivtests: misspelled.json: unknown field 'magnitud'; known are accumulation, ")


REFUSED = {
    "run text.json": r"text.json: not JSON: .*",
    "run bytes.json": r"bytes.json: not text: .*",
    "run nowhere.json": r"nowhere.json: No such file or directory",
    "run .": r"\.: Is a directory",
    "run case.json --strategy ddp-fp16-hook": r"strategy ddp-fp16-hook does not claim .*: precision .*",
    "run case.json --strategy nope": r"no strategy claims case 'two-by-three'; `equivtests list` shows .*",
    "run case.json --adapter own:Absent": r"adapter 'own:Absent': module own has no 'Absent'; adapters there: .*",
    "run case.json --strategy dp --backend nccl": r"backend nccl works on CUDA tensors only; .*",
    "reproduce nowhere.json": r"nowhere.json: no such fixture here, and none of that name comes with the package",
    "reproduce text.json": r"text.json: not JSON: .*",
    "reproduce fixture-text.json": r"fixture-text.json: field 'case' is missing",
    "reproduce case.json": r"case.json: unknown field 'accumulation'; known are .*",
    "shrink case.json smaller.json": r"\d+ strategies claim the case: choose one with --adapter and --strategy",
    "adapter-check own:Right --nproc 0": r"--nproc 0: at least one rank is needed",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_run_is_refused_in_one_line(refused: Refused, line: str) -> None:
    message = refused(*line.split())
    assert re.fullmatch(REFUSED[line], message), message


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_deadline_that_is_no_time_is_a_usage_error(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "case.json", "--deadline", value])
    assert stop.value.code == 2
    assert "argument --deadline" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- reproduce


def test_a_fixture_reproduces_its_mistake(ran: Ran) -> None:
    lines = ran["reproduce"].ended_with(0).lines
    assert lines[0] == f"{MUTANT.name}: {MUTANT.mistake} ({MUTANT.source})"
    assert lines[1].startswith(f"FAIL         dp-{MUTANT.case.name}")
    assert lines[2].strip() == f"dp on {MUTANT.case.name}: update 0: tokens differ first"
    assert lines[-2].strip() == "reproduce: python -m equivtests reproduce fixture.json"
    assert lines[-1] == "reproduced"


def test_a_fixture_whose_mistake_does_not_show_says_so(ran: Ran) -> None:
    assert ran["reproduce no mistake"].ended_with(1).lines[-1] == "not reproduced: expected FAIL by tokens"


def test_a_correct_adapter_passes_the_case_of_a_fixture(ran: Ran) -> None:
    assert ran["reproduce right"].ended_with(0).output.startswith(f"PASS         right-{MUTANT.case.name}")


def test_a_wrong_adapter_fails_the_case_of_a_fixture(ran: Ran) -> None:
    lines = ran["reproduce wrong"].ended_with(1).lines
    assert lines[0].startswith(f"FAIL         wrong-{MUTANT.case.name}")
    command = "reproduce: python -m equivtests reproduce fixture.json --adapter own:Wrong --strategy wrong"
    assert lines[-1].strip() == command


def test_a_strategy_replays_only_fixtures_of_chapters_that_it_is_judged_in() -> None:
    dp = strategy_of(MUTANT.parent, "dp")
    assert [chapter_refusal(dp, chapter) for chapter in ("update", "restore", "ledger")] == [None] * 3
    plain = dataclasses.replace(dp, restores=False, algorithm=None)
    assert chapter_refusal(plain, "update") is None
    assert chapter_refusal(plain, "restore") == "restoring"
    assert chapter_refusal(plain, "ledger") == "the ledger: it declares no algorithm"


# ---------------------------------------------------------------------------------------------- shrink


def size(case: Case) -> tuple[int, ...]:
    rows = [row for window in case.windows for rank in window for micro in rank for row in micro]
    return case.updates, case.layout.world, len(rows), sum(rows)


def test_a_failing_case_becomes_smaller_and_still_fails_by_the_same_quantity(ran: Ran, home: Home) -> None:
    said = r"smaller.json: 1 updates on 2 ranks, still fails by loss"
    assert ran["shrink"].ended_with(0).output.strip() == said
    smaller = loads((home.directory / "smaller.json").read_text())
    assert size(smaller) < size(TWO_BY_THREE)
    assert size(smaller)[3] == 1, "one token on one of two ranks is the least that tells"
    again = home.run(*EQUIVTESTS, *shlex.split("run smaller.json --adapter own:Wrong"))
    assert again.ended_with(1).lines[1].strip() == "wrong on two-by-three: update 0: loss differs first"


def test_a_case_of_one_update_can_be_shrunk() -> None:
    one = TWO_BY_THREE.replace(windows=TWO_BY_THREE.windows[:1])
    assert size(shrink(one, lambda case: True)) == (1, 1, 0, 0)


SMALLEST = {
    "gpt-uneven-stages-pp4": Layout(1, pp=2),
    "gpt-virtual-dp2-pp2v2": Layout(1, pp=2),
    "gpt-grouped-dp2-tp4": Layout(1, tp=2),
    "gpt-turned-dp2-cp2-by-cp-dp": Layout(1, cp=2),
    "moe-clip-dp4-ep4": Layout(2, ep=2),
    "gpt-three-dp2-tp2-pp2": Layout(1, tp=2, pp=2),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_a_case_of_a_split_model_keeps_the_axes_that_split_it(name: str) -> None:
    """A failure that needs nothing but its axes: two ranks of each are left, and the least model that they can hold."""
    case = split_named(name)
    assert case is not None
    smaller = shrink(case, lambda c: c.layout.splits == case.layout.splits)
    assert smaller.layout == SMALLEST[name]
    assert (smaller.model.depth, smaller.model.width, smaller.model.length) == (smaller.layout.pp, 2, 2)
    assert (smaller.model.features, smaller.model.kv_heads, smaller.model.capacity) == ((), 0, 0)


def test_stages_that_a_failure_needs_are_kept_and_their_layers_taken_away() -> None:
    case = split_named("gpt-uneven-stages-pp4")
    assert case is not None
    assert shrink(case, lambda c: c.layout.stages[:1] == (0,)).layout.stages == (0, 0, 0, 1)


def test_sequence_lengths_that_a_failure_needs_are_kept() -> None:
    case = split_named("gpt-lengths-dp2-tp2")
    assert case is not None
    assert shrink(case, lambda c: len(set(c.lengths)) == 2).lengths == case.lengths
    assert shrink(case, lambda c: c.layout.tp == 2).lengths == ()


def test_a_case_that_does_not_fail_is_not_shrunk(refused: Refused) -> None:
    message = refused("shrink", "one-update.json", "smaller.json", "--strategy", "dp")
    assert message == "one-update.json: dp does not fail on it, there is nothing to shrink"


# ---------------------------------------------------------------------------------------------- adapter-check


def test_an_adapter_that_works_is_told_what_comes_next(ran: Ran) -> None:
    assert ran["check right"].ended_with(0).lines == [
        "own:Right: loaded",
        "  right, 1 rank: works",
        "  right, 2 ranks: works",
        "the adapter works; certify it: python -m pytest --pyargs equivtests --nproc 4 --adapter own:Right",
    ]


BROKEN = {
    "transposed": r"weight (\S+) on rank 0 at update 0: "
    r"place.shape is \((\d+), (\d+)\), but the whole parameter has shape \(\3, \2\)",
    "renamed": r"weight module\.\S+ on rank 0 at update 0: the model has no such parameter; canonical names are .*",
    "left-out": r"weight \S+ entering update 0: shown by no rank",
    "infinite": r"weight \S+ on rank 0 at update 1: not finite \(NaN or infinity\)",
    "raising": r"rank 1 raised RuntimeError: no kernel for this \(own.py:\d+\) while running update 0",
    "differing": r"runs, but differs:",
    "unsaved": r"restore: rank [01] raised TypeError: save_tensors\(\) is not written \(own.py:\d+\) .*",
    "silent": r"lr: never shown, though strategy silent promises it in `observes`",
    "fine": r"works",
}


def said_of(ran: Ran, strategy: str) -> str:
    return ran["check broken"].line(f"{strategy}, 2 ranks: ").removeprefix(f"{strategy}, 2 ranks: ")


@pytest.mark.parametrize("strategy", BROKEN)
def test_what_is_broken_in_an_adapter_is_named_by_strategy(ran: Ran, strategy: str) -> None:
    assert re.fullmatch(BROKEN[strategy], said_of(ran, strategy)), said_of(ran, strategy)


def test_an_adapter_of_which_a_part_is_broken_is_to_be_mended_first(ran: Ran) -> None:
    lines = ran["check broken"].ended_with(1).lines
    assert lines[-1] == "mend this first"
    assert "  elsewhere: claims worlds [4]: try one of them with --nproc" in lines
    assert "    differing on smoke-mlp-w2: update 0: loss differs first" in lines
    assert any(line.strip() == 'raise RuntimeError("no kernel for this")' for line in lines), "the stack is shown"


def test_an_adapter_that_cannot_be_imported_tells_why(ran: Ran) -> None:
    message = ran["check unimportable"].refused_in_one_line(2)
    assert "cannot import unimportable: ModuleNotFoundError: No module named 'framework_that_is_not_there'" in message


MALFORMED = {
    "own": r"adapter 'own': expected 'package.module:Class', such as .*",
    "own:NotAnAdapter": r"adapter 'own:NotAnAdapter': NotAnAdapter is no subclass of Adapter; adapters there: .*",
    "own:NoClaims": r"own:NoClaims: claims\(\) raised TypeError: .* return Claims\(\(Strategy\(...\),\)\)",
    "own:AList": r"own:AList: claims\(\) must return Claims\(\(Strategy\(…\), …\)\), got \[Strategy.*",
    "own:NoTuple": r"own:NoTuple: claims\(\) must return Claims\(\(Strategy\(…\), …\)\), got Claims\(.*",
    "own:NoStrategy": r"own:NoStrategy: claims\(\) names no strategy; give every strategy a name of its own",
    "own:Twice": r"own:Twice: claims\(\) names \['a', 'a'\]; give every strategy a name of its own",
    "own:Spaced": r"own:Spaced: strategy my dp: a name consists of letters, digits and . _ \+ - .*",
    "own:SetAsList": r"own:SetAsList: strategy a: families is \['mlp'\]; write frozenset\(\{…\}\)",
    "own:Isolated": r"own:Isolated: isolation is 'cases'; use 'pool' or 'case'",
    "own:Misfit": r"own:Misfit: claims\(\) raised ValueError: strategy 'a': algorithm: unknown 'magic'; known .*",
    "own:Arguments": r"own:Arguments cannot be made without arguments: .*",
}


@pytest.mark.parametrize("spec", MALFORMED)
def test_an_adapter_that_is_malformed_is_told_what_to_write(refused: Refused, spec: str) -> None:
    message = refused("adapter-check", spec)
    assert re.fullmatch(MALFORMED[spec], message), message


def test_the_case_of_a_fixture_is_read_as_it_was_written(home: Home) -> None:
    assert json.loads((home.directory / "fixture.json").read_text())["case"] == json.loads(dumps(MUTANT.case))
