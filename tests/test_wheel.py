"""The wheel: in an empty directory it certifies and replays its fixtures, and it does not disturb a checkout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import CHECKOUT, Ended, Home, together

from equivtests import __version__

MINE = """
from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.torch_adapter import TorchAdapter


class Mine(TorchAdapter):
    def claims(self):
        return Claims((Strategy("of-my-own"),))
"""


def pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", str(directory), str(CHECKOUT))
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    pip("install", "--no-index", "--no-deps", "--target", str(target), str(wheel))
    return target


@pytest.fixture(scope="module")
def ran(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Commands in an empty directory and, the last one, in the checkout; all with the installed wheel on the path."""
    empty = Home(tmp_path_factory.mktemp("empty"), mine=MINE)
    checkout = Home(tmp_path_factory.mktemp("checkout"))
    empty.environment = checkout.environment = {"PYTHONPATH": str(installed)}
    checkout.directory = CHECKOUT
    shutil.copy(installed / "bin" / "equivtests", empty.directory / "script")
    suite = ("python", "-m", "pytest", "--pyargs", "equivtests", "--nproc", "2", "--tier", "quick", "--strategy", "dp")
    collect = ("python", "-m", "pytest", "--collect-only", "-q", "equivtests/", "--nproc", "2", "--strategy", "dp")
    results = together(
        {
            "suite": (empty, suite),
            "reproduce": (empty, ("python", "-m", "equivtests", "reproduce", "hf-ga-mean-of-means")),
            "script": (empty, ("python", "-P", "script", "list", "--adapter", "mine:Mine")),
            "checkout": (checkout, (*collect, "--certificate", str(empty.directory / "unused.json"))),
        }
    )
    assert [*empty.left(), *checkout.left()] == []
    results["certificate"] = Ended(0, (empty.directory / "equivtests-certificate.json").read_text())
    return results


def test_a_wheel_holds_the_package_and_its_fixtures_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"equivtests-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"equivtests", f"equivtests-{__version__}.dist-info"}
    here = {f"equivtests/fixtures/{path.name}" for path in (CHECKOUT / "fixtures").glob("*.json")}
    assert here and here == {name for name in names if name.endswith(".json")}
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "equivtests").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py") and "/fixtures/" not in name}


def test_an_installed_wheel_registers_its_options_and_certifies(ran: dict[str, Ended]) -> None:
    output = ran["suite"].ended_with(0).output
    assert ran["suite"].line("certificate: ") == "certificate: equivtests-certificate.json"
    certificate = json.loads(ran["certificate"].output)
    assert certificate["complete"] is True
    passed = certificate["all"]["counts"]["passed"]
    assert re.search(rf"= {passed} passed in ", output), "the fixtures that it carries are no part of the suite"


def test_an_installed_wheel_replays_a_fixture_that_it_carries(ran: dict[str, Ended]) -> None:
    assert ran["reproduce"].ended_with(0).lines[-1] == "reproduced"


def test_the_installed_script_finds_adapters_in_the_current_directory(ran: dict[str, Ended]) -> None:
    assert "  of-my-own          mine:Mine" in ran["script"].ended_with(0).lines


def test_a_checkout_registers_its_options_once_where_a_wheel_is_installed_too(ran: dict[str, Ended]) -> None:
    output = ran["checkout"].ended_with(0).output
    assert "test_update.py::test_every_update_is_that_of_one_device[dp-gpt-adamw-w2]" in output
