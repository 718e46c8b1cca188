"""Running the real commands: each in a directory that plays a user's repository, with its own temporary directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).parent.parent
DEADLINE = 300.0  # for one command on a loaded machine; an idle one takes seconds
AT_ONCE = 2

FROM_THE_CHECKOUT = {"PYTHONPATH": str(CHECKOUT), "PYTEST_ADDOPTS": "-p no:equivtests -p equivtests.plugin"}
"""The plugin as an installation would register it, whether or not this environment has one."""

NOT_INHERITED = ("PYTEST_", "PYTHONPATH", "GITHUB_", "CI", "BUILD_NUMBER")
"""What changes how a command runs or prints: under CI, pytest repeats every failure whole in its summary."""


@dataclass
class Ended:
    """A command that ended. `output`: stdout and stderr together."""

    status: int
    output: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    def line(self, beginning: str) -> str:
        """The one line that begins so (indentation aside)."""
        found = [line.strip() for line in self.lines if line.strip().startswith(beginning)]
        assert len(found) == 1, f"{len(found)} lines begin with {beginning!r}\n{self.output}"
        return found[0]

    def ended_with(self, status: int) -> Ended:
        assert self.status == status, self.output
        return self

    def refused_in_one_line(self, status: int) -> str:
        """The message of a command that refused its input: one line, no traceback."""
        lines = [line for line in self.ended_with(status).lines if line]
        assert len(lines) == 1, self.output
        return lines[0]


class Home:
    """A user's repository. `files`: names and texts of what lies in it."""

    def __init__(self, directory: Path, **files: str) -> None:
        self.directory, self.temporary = directory, directory.with_name(directory.name + "-tmp")
        self.directory.mkdir(exist_ok=True)
        self.temporary.mkdir()
        self.environment = FROM_THE_CHECKOUT
        for name, text in files.items():
            (directory / f"{name}.py").write_text(text)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command; "python" and "pytest" are those of this environment."""
        program = [sys.executable] if words[0] == "python" else [str(Path(sys.executable).parent / words[0])]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
        return subprocess.Popen(
            [*program, *words[1:]],
            cwd=self.directory,
            env=inherited | self.environment | {"TMPDIR": str(self.temporary), "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str) -> Ended:
        return ended(self.start(*words))

    def left(self, seconds: float = 30.0) -> list[str]:
        """Processes and temporary directories that commands left behind, after some time to go."""
        end = time.monotonic() + seconds
        while (remains := self._remains()) and time.monotonic() < end:
            time.sleep(0.1)
        return remains

    def _remains(self) -> list[str]:
        processes = [f"process {p.pid}: {p.name()}" for p in psutil.process_iter() if self._started(p)]
        return processes + [str(path) for path in self.temporary.glob("equivtests-*")]

    def _started(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TMPDIR") == str(self.temporary) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for a command; one that hangs is killed, and that fails the test."""
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{process.args} did not end within {DEADLINE:g} s\n{output}") from None
    return Ended(process.returncode, output)


def together(commands: dict[str, tuple[Home, tuple[str, ...]]]) -> dict[str, Ended]:
    """Run several commands, as many at once as two cores can use."""
    with ThreadPoolExecutor(AT_ONCE) as executor:
        running = {name: executor.submit(home.run, *words) for name, (home, words) in commands.items()}
        return {name: future.result() for name, future in running.items()}
