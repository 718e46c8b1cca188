"""`python -m pytest --pyargs equivtests …` as users run it: exit status, table, certificate, explanations, clean-up."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commands import DEADLINE, Ended, Home, ended, together

from equivtests.chapters.plan import plan
from equivtests.plugin import refuse_useless

SUITE = ("python", "-m", "pytest", "--pyargs", "equivtests")
QUICK = (*SUITE, "--nproc", "2", "--tier", "quick")
DP = (*QUICK, "--strategy", "dp")
RUNS = [run.id for run in plan(tier="quick", nproc=2, strategies=["dp"]).runs]
COUNTS = ("declared", "run", "passed", "failed", "known", "inconclusive", "error", "not claimed")
COLUMNS = ("strategy", *COUNTS, "loss", "gradient", "norm", "weight update", "trajectory")

MINE = '''
import os
import signal
import time
from pathlib import Path

from equivtests.adapters.adapter import Claims, KnownDivergence, Strategy
from equivtests.adapters.textbook.dp import DataParallel


def claims(*names, **promises):
    """Strategies that run one case of the quick tier on two ranks, gpt-adamw-w2."""
    return Claims(tuple(Strategy(name, families=frozenset({"gpt"}), **promises) for name in names))


class Local(DataParallel):
    """Divides by the tokens of the rank."""

    def claims(self):
        return claims("local")

    def token_factor(self, span, k, batch):
        return 1 / max(1, sum(b.tokens for b in self.window.microbatches))


class Drifting(DataParallel):
    """One copy of the weights goes its own way."""

    def claims(self):
        return claims("drifting")

    def optimizer_step(self):
        super().optimizer_step()
        if self.ranks.rank == 1 and self.window.update == 1:
            next(iter(self.module.parameters())).data += 0.25


def known(quantity):
    return (KnownDivergence("gpt-*", quantity, "divides by its own tokens", "https://example.org/1"),)


class Declared(Local):
    def claims(self):
        return claims("declared", known=known("loss"))


class DeclaredInVain(DataParallel):
    def claims(self):
        return claims("in-vain", known=known("loss"))


class Breaking(DataParallel):
    """Rank 1 breaks in the second update, in the way that the strategy is named after."""

    def claims(self):
        return claims("raising", "killed", "hanging", "sound")

    def synchronize(self):
        if self.ranks.rank == 1 and self.window.update == 1:
            getattr(self, self.strategy)()
        super().synchronize()

    def raising(self):
        raise ValueError("the weights are not mine")

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hanging(self):
        Path("reached").touch()
        time.sleep(3600)

    def sound(self):
        pass


class OnlyLower(DataParallel):
    def claims(self):
        return claims("lower", precisions=frozenset({"float32/bfloat16/float32"}))


class NotAnAdapter:
    pass
'''

PLANTED = '''

from equivtests.adapters.textbook.dp import DataParallel
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import TWO_BY_THREE


@mutant("no-mistake", strategy="dp", case=TWO_BY_THREE, quantity="loss", source="none", mistake="none")
class NoMistake(DataParallel):
    """Correct code."""
'''

DROWNED = """
from equivtests.cases import grid
from equivtests.cases.case import Model

arguments = ((2,), Model("gpt", depth=8), grid.UNEQUAL[:1], grid.SGD, grid.BF16)
grid.GRID += (grid.row("drowned", "quick", "eight layers in bfloat16: gradients drown in rounding", *arguments),)
"""


@dataclass
class Shown:
    """What a run of the suite left: its output and the directory that it ran in."""

    home: Home
    ended: Ended

    def certificate(self, name: str = "equivtests-certificate.json") -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.home.directory / name).read_text())
        return data

    def counts(self, strategy: str) -> dict[str, int]:
        """A row of the printed table, which the certificate repeats."""
        counts = dict(zip(COUNTS, map(int, self.ended.line(f"{strategy} ").split()[1:9]), strict=True))
        assert counts == (self.certificate()["strategies"] | {"all": self.certificate()["all"]})[strategy]["counts"]
        return {name: n for name, n in counts.items() if n}

    def explanation(self, test: str) -> list[str]:
        """The lines under the headline of a failed test."""
        below = self.ended.output.partition(f"[{test}] ___")[2].splitlines()[1:]
        end = next(i for i, line in enumerate(below) if line.startswith(("____", "====")))
        return [line.strip() for line in below[:end]]


def with_plugin(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """A pytest command that also loads a module of the user's as a plugin."""
    return (*words[:3], "-p", name, *words[3:])


Runs = dict[str, Shown]
Runner = Callable[[dict[str, tuple[str, ...]]], Runs]


@pytest.fixture(scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Run commands side by side, each in a repository of its own, which must be left clean."""

    def run(commands: dict[str, tuple[str, ...]]) -> Runs:
        homes = {
            name: Home(tmp_path_factory.mktemp("home"), mine=MINE, planted=PLANTED, drowned=DROWNED)
            for name in commands
        }
        for home in homes.values():
            home.environment = home.environment | {"GITHUB_STEP_SUMMARY": str(home.directory / "summary.md")}
        outputs = together({name: (homes[name], words) for name, words in commands.items()})
        assert [left for home in homes.values() for left in home.left()] == []
        return {name: Shown(homes[name], outputs[name]) for name in commands}

    return run


# ---------------------------------------------------------------------------------------------- what passes

REPORTS = ("--certificate", "out/c.json", "--junitxml", "j.xml", "--keep-records", "kept")


@pytest.fixture(scope="module")
def passing(run_all: Runner) -> Runs:
    four = (*SUITE, "--nproc", "4", "--tier", "quick", "--strategy", "dp", *REPORTS)
    some = (*DP, "--threshold", "20", "-k", "linear")
    return run_all({"four": four, "once": DP, "again": DP, "workers": (*DP, "-n", "2"), "some": some})


def test_what_passes_exits_with_0_and_says_where_the_certificate_lies(passing: Runs) -> None:
    four, once = passing["four"], passing["once"]
    assert four.ended.ended_with(0).line("certificate:") == "certificate: out/c.json"
    assert once.ended.ended_with(0).line("certificate:") == "certificate: equivtests-certificate.json"
    assert not (four.home.directory / "equivtests-certificate.json").exists()


def test_the_table_counts_every_run_by_strategy_and_in_all(passing: Runs) -> None:
    once = passing["once"]
    assert " ".join(once.ended.line("strategy ").split()) == " ".join(COLUMNS)
    assert once.counts("dp") == once.counts("all") == dict.fromkeys(("declared", "run", "passed"), len(RUNS))
    assert re.search(rf"= {len(RUNS)} passed in", once.ended.output)


def test_the_certificate_of_what_passes_is_complete(passing: Runs) -> None:
    data = passing["four"].certificate("out/c.json")
    assert data["complete"] is True
    assert {run["verdict"] for run in data["runs"]} == {"PASS"}
    assert {run["chapter"] for run in data["runs"]} == {"update", "restore", "ledger"}
    assert len(data["runs"]) == data["all"]["counts"]["declared"]
    assert (data["selection"]["nproc"], data["selection"]["strategies"], data["too_large"]) == (4, ["dp"], [])


@pytest.mark.parametrize("other", ["again", "workers"])
def test_certificates_agree_byte_for_byte_also_with_xdist(passing: Runs, other: str) -> None:
    passing[other].ended.ended_with(0)
    files = [passing[name].home.directory / "equivtests-certificate.json" for name in ("once", other)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_cases_that_need_more_ranks_are_listed(passing: Runs) -> None:
    assert "gpt-adamw-w4 needs --nproc 4" in passing["once"].ended.lines
    assert {"case": "gpt-adamw-w4", "needs": "--nproc 4"} in passing["once"].certificate()["too_large"]
    assert " needs --nproc " not in passing["four"].ended.output


def test_the_step_summary_and_the_junit_file_are_written(passing: Runs) -> None:
    directory = passing["four"].home.directory
    summary = (directory / "summary.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in summary if line.startswith("|")] == ["strategy", "---", "dp", "all"]
    cases = ElementTree.parse(directory / "j.xml").getroot().iter("testcase")
    assert len(list(cases)) == passing["four"].certificate("out/c.json")["all"]["counts"]["run"]


def test_kept_records_are_judged_again_without_ranks(passing: Runs) -> None:
    home = passing["four"].home
    kept = sorted(path.parent for path in home.directory.glob("kept/*/*/*/record.json"))
    restored = [path for path in kept if path.parts[-3] == "restore"]
    assert [path.name for path in restored[:2]] == ["record-0", "record-1"]
    chosen = {str(path): (home, ("python", "-m", "equivtests", "judge", str(path))) for path in (kept[-1], restored[1])}
    for found in together(chosen).values():
        assert any(line.startswith("PASS ") for line in found.ended_with(0).lines)


def test_a_selection_by_k_is_partial_and_no_certificate(passing: Runs) -> None:
    some = passing["some"]
    assert some.ended.ended_with(0).line("partial result, not a certificate")
    chosen = sum("linear" in run for run in RUNS)
    assert some.counts("dp") == {"declared": len(RUNS), "run": chosen, "passed": chosen}
    assert some.certificate()["complete"] is False


def test_a_loosened_threshold_is_stated(passing: Runs) -> None:
    some = passing["some"]
    assert "the threshold was loosened to 20 (default 8)" in some.ended.lines
    assert some.certificate()["threshold"] == {"value": 20.0, "default": 8.0, "loosened": True}
    assert "loosened" not in passing["once"].ended.output
    assert passing["once"].certificate()["threshold"]["loosened"] is False


# ---------------------------------------------------------------------------------------------- what does not pass


@pytest.fixture(scope="module")
def failing(run_all: Runner) -> Runs:
    def mine(*names: str) -> tuple[str, ...]:
        return tuple(word for name in names for word in ("--adapter", f"mine:{name}"))

    return run_all(
        {
            "wrong": (*QUICK, *mine("Local", "Drifting", "DeclaredInVain"), "--threshold", "4"),
            "breaking": (*QUICK, *mine("Breaking"), "--deadline", "8"),
            "declared": (*QUICK, *mine("Declared")),
            "drowned": (*with_plugin("drowned", DP), "-k", "drowned"),
        }
    )


def test_a_wrong_adapter_fails_and_the_first_difference_is_explained(failing: Runs) -> None:
    wrong = failing["wrong"]
    wrong.ended.ended_with(1)
    lines = wrong.explanation("local-gpt-adamw-w2")
    patterns = [
        r"FAIL: local on gpt-adamw-w2: update 0: loss differs first",
        r"expected 2\.\d+, observed 2\.\d+",
        r"error / rounding radius = \S+, allowed 4",
        r"observed / expected loss = 0\.\d+",
        r"the gradients are those of `denominator = rank`: each rank divides by its own valid tokens, .*",
        r"\d+ more checks of this update did not pass; .*",
        r"reproduce: .*pytest --nproc 2 .*",
    ]
    assert all(re.fullmatch(p, line) for p, line in zip(patterns, lines, strict=True)), lines


def test_a_difference_of_one_rank_names_the_update_the_parameter_and_the_rank(failing: Runs) -> None:
    headline, *lines = failing["wrong"].explanation("drifting-gpt-adamw-w2")
    assert re.fullmatch(r"FAIL: drifting on gpt-adamw-w2: update 1: weight update of \S+ differs first", headline)
    assert "first seen on rank 1" in lines


def test_the_table_and_the_certificate_count_what_failed(failing: Runs) -> None:
    wrong = failing["wrong"]
    assert wrong.counts("local") == {"declared": 1, "run": 1, "failed": 1, "not claimed": 3}
    assert wrong.counts("all") == {"declared": 3, "run": 3, "failed": 3, "not claimed": 9}
    assert wrong.ended.line("partial result, not a certificate")
    data = wrong.certificate()
    assert data["complete"] is False
    first = {run["strategy"]: run["first"] and run["first"]["quantity"] for run in data["runs"]}
    assert first == {"local": "loss", "drifting": "weight update", "in-vain": None}


def test_the_reproduce_line_shows_the_same_failure_in_one_test(failing: Runs) -> None:
    """As it is printed, from the user's directory; with the options that the run was made with."""
    wrong = failing["wrong"]
    lines = wrong.explanation("local-gpt-adamw-w2")
    again = Shown(wrong.home, wrong.home.run(*shlex.split(lines[-1].removeprefix("reproduce: "))))
    assert "[local-gpt-adamw-w2]" in again.ended.ended_with(1).line("FAILED ")
    assert re.search(r"= 1 failed, \d+ deselected in ", again.ended.output)
    assert again.explanation("local-gpt-adamw-w2") == lines


def test_a_known_divergence_that_shows_is_counted_and_passes(failing: Runs) -> None:
    declared = failing["declared"]
    declared.ended.ended_with(0)
    assert declared.counts("declared") == {"declared": 1, "run": 1, "known": 1, "not claimed": 3}
    assert declared.certificate()["complete"] is True


def test_a_known_divergence_that_does_not_show_fails(failing: Runs) -> None:
    lines = failing["wrong"].explanation("in-vain-gpt-adamw-w2")
    assert lines == ["FAIL: declared to differ in loss (divides by its own tokens), but it passes: remove the entry"]


def test_what_a_case_cannot_tell_is_inconclusive_and_fails(failing: Runs) -> None:
    drowned = failing["drowned"]
    headline = drowned.ended.ended_with(1).line("INCONCLUSIVE: ")
    assert re.fullmatch(
        r"INCONCLUSIVE: dp on drowned-w2: update 0: gradient of \S+ cannot be told from rounding", headline
    )
    assert drowned.counts("dp") == {"declared": len(RUNS) + 1, "run": 1, "inconclusive": 1}
    assert drowned.certificate()["complete"] is False


BREAKING = {
    "raising": r"rank 1 raised ValueError: the weights are not mine \(mine.py:\d+\) while running update 1",
    "killed": r"rank 1 was killed by SIGKILL while running update 1",
    "hanging": r"rank 0 waits in all_reduce .* rank 1 is at mine.py:\d+ \(hanging\); the deadline of 8 s passed .*",
}


@pytest.mark.parametrize("name", BREAKING)
def test_a_rank_that_breaks_is_an_error_with_its_name_and_a_command(failing: Runs, name: str) -> None:
    headline, *lines = failing["breaking"].explanation(f"{name}-gpt-adamw-w2")
    assert re.fullmatch(rf"ERROR: {name} on gpt-adamw-w2: {BREAKING[name]}", headline), headline
    assert shlex.split(lines[-1])[-2:] == ["--deadline", "8.0"]


def test_the_runs_after_a_broken_one_are_made(failing: Runs) -> None:
    breaking = failing["breaking"]
    breaking.ended.ended_with(1)
    assert breaking.counts("all") == {"declared": 4, "run": 4, "passed": 1, "error": 3, "not claimed": 12}
    assert breaking.counts("sound") == {"declared": 1, "run": 1, "passed": 1, "not claimed": 3}


def test_ctrl_c_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", mine=MINE)
    words = (*QUICK, "--adapter", "mine:Breaking", "--strategy", "hanging", "--deadline", "600")
    process = home.start(*words)
    end = time.monotonic() + DEADLINE
    while not (home.directory / "reached").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert "KeyboardInterrupt" in ended(process).ended_with(2).output
    assert home.left() == []


# ---------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "no such strategy": (
        ("--strategy", "nope"),
        r"--strategy nope: unknown; known are 1f1b, .*zero-redundancy",
    ),
    "no such strategy, with workers": (
        ("--strategy", "nope", "-n", "2"),
        r"--strategy nope: unknown; known are 1f1b, .*zero-redundancy",
    ),
    "no adapter": (
        ("--adapter", "mine:NotAnAdapter"),
        r"adapter 'mine:NotAnAdapter': NotAnAdapter is no subclass of Adapter; adapters there: .*Local.*",
    ),
    "no bfloat16 alone": (
        ("--adapter", "mine:OnlyLower"),
        r"mine:OnlyLower: strategy lower: claims float32/bfloat16/float32 without float32: .*",
    ),
    "no name twice": (
        ("--adapter", "mine:Local", "--adapter", "mine:Local"),
        r"mine:Local: another adapter has a strategy local, too; rename one",
    ),
    "no GPUs": (
        ("--backend", "nccl", "--device", "cuda", "--nproc", "64"),
        r".*found torch \S+, CUDA available: \w+, CUDA devices: \d+.*",
    ),
    "no nccl on cpu": (
        ("--backend", "nccl"),
        "backend nccl works on CUDA tensors only; use device cuda, or backend gloo",
    ),
    "no ranks": (("--nproc", "0"), "--nproc 0: at least one rank is needed"),
}


@pytest.fixture(scope="module")
def refused(run_all: Runner) -> Runs:
    return run_all({name: (*QUICK, *words) for name, (words, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_useless_options_are_refused_in_one_line_with_status_4(refused: Runs, name: str) -> None:
    message = refused[name].ended.refused_in_one_line(4)
    assert re.fullmatch(f"ERROR: {REFUSED[name][1]}", message), message


@pytest.mark.parametrize(
    ("option", "value"), [("seeds", 0), ("threshold", float("nan")), ("threshold", 0.0), ("deadline", float("inf"))]
)
def test_numbers_that_judge_nothing_are_refused(option: str, value: float) -> None:
    usual = {"seeds": 1, "threshold": 8.0, "deadline": 30.0}
    refuse_useless(Namespace(**usual))
    with pytest.raises(pytest.UsageError, match=f"^--{option} {value:g}: "):
        refuse_useless(Namespace(**usual | {option: value}))


# ---------------------------------------------------------------------------------------------- mutants


@pytest.fixture(scope="module")
def mutants(run_all: Runner) -> Runs:
    found = "hf-ddp-local-count or trl-local-normaliser"
    run = (*SUITE, "--nproc", "2", "--mutants", "-k")
    return run_all({"killed": (*run, found), "survivor": (*with_plugin("planted", run), f"{found} or no-mistake")})


def test_killed_mutants_are_counted_and_exit_with_0(mutants: Runs) -> None:
    assert "mutants: 2 killed of 2 planted" in mutants["killed"].ended.ended_with(0).lines


def test_a_mutant_that_survives_fails(mutants: Runs) -> None:
    survivor = mutants["survivor"]
    assert "mutants: 2 killed of 3 planted" in survivor.ended.ended_with(1).lines
    assert survivor.explanation("no-mistake")[0] == "no-mistake survived: expected FAIL by loss, got PASS"


def test_mutants_make_no_certificate(mutants: Runs) -> None:
    assert not (mutants["killed"].home.directory / "equivtests-certificate.json").exists()
