"""The pytest plugin: options, parametrization, and the summary. Nothing else in the package imports pytest."""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from equivtests.adapters.builtin import BUILTIN
from equivtests.cases.grid import TIERS
from equivtests.errors import EquivtestsError
from equivtests.judge.check import Verdict
from equivtests.judge.tolerance import THRESHOLD
from equivtests.ranks.pools import Pools

if TYPE_CHECKING:
    from equivtests.chapters.plan import Plan
    from equivtests.chapters.run import Chapter, Result, Run
    from equivtests.mutants.mutant import Mutant
    from equivtests.report.certificate import Selection
    from equivtests.report.tally import Row

SUITE = Path(__file__).parent
CHAPTERS: tuple[Chapter, ...] = ("update", "restore", "replay", "ledger")
RESULT = pytest.StashKey[dict[str, Any]]()
SESSION = pytest.StashKey["Session"]()


def suite() -> ModuleType:
    """What needs torch, imported when it is first used: other people's tests start without it."""
    return importlib.import_module("equivtests.suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("equivtests", "certifying distributed updates")
    add = group.addoption
    add("--nproc", type=int, default=4, help="largest number of ranks (default 4)")
    add("--adapter", action="append", default=[], metavar="MODULE:CLASS", help="instead of the built-in ones")
    add("--model", default="", metavar="MODULE:CLASS", help="one of your own, instead of the suite's (a weaker claim)")
    add("--strategy", action="append", default=[], metavar="NAME", help="only these strategies (may be repeated)")
    add("--tier", choices=TIERS, default="default", help="how much of the grid (default: default)")
    add("--seeds", type=int, default=1, metavar="N", help="run the grid on seeds 0..N-1 (default 1)")
    add("--seed", type=int, default=None, metavar="S", help="run the grid on this one seed")
    add("--backend", choices=("gloo", "nccl"), default="gloo", help="process group backend (default gloo)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where models live (default cpu)")
    add("--deadline", type=float, default=30.0, metavar="SECONDS", help="for one run on ranks (default 30)")
    add("--threshold", type=float, default=THRESHOLD, metavar="RATIO", help=f"allowed error (default {THRESHOLD:g})")
    add("--certificate", type=Path, default=None, metavar="PATH", help="default: equivtests-certificate.json")
    add("--keep-records", type=Path, default=None, metavar="DIR", help="keep what the ranks observed")
    add("--mutants", action="store_true", help="run the planted mistakes instead: every one must be found")


class Session:
    """What one pytest process knows: the plan, the ranks, and (where it reports) all results."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.config, self.option = config, option
        self.seeds = (option.seed,) if option.seed is not None else tuple(range(option.seeds))
        self.adapters = tuple(option.adapter) or BUILTIN
        refuse_useless(option)
        self.pools = Pools(option.nproc, option.backend, option.device, option.deadline)
        self.results: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self.settings: dict[str, str] = {}
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """Made when first needed: a run of other tests pays nothing for it."""
        if self._plan is None:
            option = self.option
            self._plan = suite().plan(
                self.adapters, option.tier, option.nproc, option.strategy, self.seeds, option.model
            )
        return self._plan

    @property
    def distributes(self) -> bool:
        """Whether this is xdist's controller, which hands the runs to its workers."""
        return getattr(self.option, "dist", "no") != "no"

    def selection(self) -> Selection:
        o = self.option
        chosen = (self.adapters, tuple(o.strategy), self.seeds, o.threshold, self.settings, o.model)
        return suite().certificate.Selection(o.nproc, o.backend, o.device, o.tier, *chosen)

    def check(self) -> None:
        """What can be refused before anything is collected, where the options ask for something of their own."""
        if (self.option.adapter or self.option.model) and str(self.config.invocation_params.dir) not in sys.path:
            sys.path.insert(0, str(self.config.invocation_params.dir))  # as `python -m pytest` does
        if self.option.adapter or self.option.model or self.option.strategy or self.option.seed is not None:
            if not self.distributes:
                self.pools.warm()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, as it is imported
                _ = self.plan
        if self.option.device != "cpu":
            self.pools.warm()
            self.pools.check_devices()

    def repeatable(self, run: Run) -> Run:
        """The run with a command that also repeats the options that it was made with."""
        given = [(name, getattr(self.option, name)) for name in ("backend", "device", "threshold", "deadline")]
        extra = "".join(f" --{name} {value}" for name, value in given if value != DEFAULTS[name])
        return replace(run, command=suite().reproduce(run) + extra) if extra else run


DEFAULTS = {"backend": "gloo", "device": "cpu", "threshold": THRESHOLD, "deadline": 30.0}


def refuse_useless(option: Any) -> None:
    """Raises UsageError for numbers that would run nothing, or judge nothing."""
    if option.seeds < 1:
        raise pytest.UsageError(f"--seeds {option.seeds}: at least one seed is needed")
    for name in ("threshold", "deadline"):
        value = getattr(option, name)
        if not (math.isfinite(value) and value > 0):
            raise pytest.UsageError(f"--{name} {value:g}: a positive number is needed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:torch")
    try:
        config.stash[SESSION] = session = Session(config)
        session.check()
    except EquivtestsError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash:
        config.stash[SESSION].pools.close()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """--mutants runs the mutants alone; without it they are not collected. Neither are a wheel's fixtures."""
    if collection_path == SUITE / "fixtures":
        return True
    if collection_path.parent == SUITE and collection_path.name.startswith("test_"):
        return True if (collection_path.name == "test_mutants.py") != config.option.mutants else None
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per declared run of the chapter, or per mutant."""
    if metafunc.definition.path.parent != SUITE:
        return  # other people's tests may use the same names
    session = metafunc.config.stash[SESSION]
    try:
        for chapter in CHAPTERS:
            if f"{chapter}_run" in metafunc.fixturenames:
                session.pools.warm()
                runs = session.plan.of(chapter)
                metafunc.parametrize(f"{chapter}_run", runs or [None], ids=lambda r: r.id if r else "none")
        if "mutant" in metafunc.fixturenames:
            session.pools.warm()
            mutants = suite().planted(session.option.nproc, session.adapters)
            metafunc.parametrize("mutant", mutants, ids=lambda m: m.name)
    except EquivtestsError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop the place-holders of chapters without a run."""
    items[:] = [item for item in items if not placeholder(item)]


def placeholder(item: pytest.Item) -> bool:
    """Whether this is the suite's own test of a chapter without a run."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    runs = (parameters[f"{name}_run"] for name in CHAPTERS if f"{name}_run" in parameters)
    return item.path.parent == SUITE and any(run is None for run in runs)


# ---------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def equivtests_session(pytestconfig: pytest.Config) -> Session:
    return pytestconfig.stash[SESSION]


@pytest.fixture
def certify(equivtests_session: Session, request: pytest.FixtureRequest) -> Callable[[Run], None]:
    """Run, judge, keep, and fail with the explanation."""

    def check(run: Run) -> None:
        run = equivtests_session.repeatable(run)
        result = suite().outcome(equivtests_session.pools, run, equivtests_session.option.threshold)
        request.node.stash[RESULT] = {"result": result.summary(), "settings": equivtests_session.pools.settings}
        suite().keep_records(equivtests_session.option.keep_records, result)
        if result.verdict not in (Verdict.PASS, Verdict.KNOWN):
            pytest.fail(f"{result.verdict}: " + "\n".join(result.explanation), pytrace=False)

    return check


@pytest.fixture
def result_of(equivtests_session: Session) -> Callable[[Run], Result]:
    """The result of a run, whatever its verdict."""
    return lambda run: suite().certify(equivtests_session.pools, run, confirm=False)


@pytest.fixture
def kill(equivtests_session: Session, request: pytest.FixtureRequest) -> Callable[[Mutant], None]:
    """Run the parent, which must pass, and the mutant, which must fail first by its quantity."""

    def check(mutant: Mutant) -> None:
        request.node.stash[RESULT] = {"kill": {"mutant": mutant.name, "killed": False}}
        outcome = suite().attempt(equivtests_session.pools, mutant)
        request.node.stash[RESULT] = {"kill": {"mutant": mutant.name, "killed": outcome.killed}}
        if not outcome.killed:
            pytest.fail("\n".join(outcome.lines), pytrace=False)

    return check


# ---------------------------------------------------------------------------------------------- reporting


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Results travel on the report, so that they also arrive from xdist's workers."""
    report = yield
    if call.when == "call":
        report.__dict__["equivtests"] = item.stash.get(RESULT, None)
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Collector(session.config.stash[SESSION]), "equivtests-collector")


class Collector:
    """Gathers results from reports and writes what is made of them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.certificate: dict[str, Any] | None = None
        self.path: Path | None = None

    @property
    def reports_here(self) -> bool:
        """Not in xdist's workers, whose reports go to the controller."""
        return not hasattr(self.session.config, "workerinput")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, "equivtests", None)
        if found and "result" in found:
            self.session.results.append(found["result"])
            self.session.settings = found["settings"] or self.session.settings
        if found and "kill" in found:
            self.session.kills.append(found["kill"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.reports_here or not self.session.results:
            return
        self.certificate = suite().certificate.certificate(
            self.session.selection(), self.session.plan, self.session.results
        )
        self.path = self.session.option.certificate or Path("equivtests-certificate.json")
        suite().certificate.write(self.path, self.certificate)
        write_step_summary(suite().tally(self.session.plan, self.session.results), self.certificate["claim"])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.certificate is not None:
            terminalreporter.section("equivtests")
            lines = suite().summary(self.session.plan, self.session.results, self.certificate, self.path)
            for line in lines:
                terminalreporter.write_line(line)
        if self.session.kills:
            killed = sum(kill["killed"] for kill in self.session.kills)
            terminalreporter.write_line("")
            terminalreporter.write_line(f"mutants: {killed} killed of {len(self.session.kills)} planted")


def write_step_summary(rows: list[Row], claim: str) -> None:
    """The table and what is claimed for GitHub's step summary, where that variable is set."""
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with open(target, "a", encoding="utf-8") as file:
            file.write(f"### equivtests\n\n{suite().markdown([*rows, suite().total(rows)])}\nclaim: {claim}\n")
