"""The parent's end of the fork server (`serve`). Free of torch.

multiprocessing's own fork server is not used: it runs the parent's main script again in every child, starts with another
sys.path than the parent's, and swallows errors of its preload.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from equivtests.errors import RanksError
from equivtests.ranks.job import Seat
from equivtests.ranks.serve import NUMBER, kill_group

START_DEADLINE = 180.0
"""Seconds for importing torch and forking on a loaded machine; a healthy start takes a few."""

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from equivtests.ranks.serve import main; main({}, {!r})"
)


@dataclass
class Child:
    """A forked process. `status` becomes readable when it ends."""

    pid: int
    pipe: Connection
    status: int

    def exit_code(self, timeout: float | None = 0.0) -> int | None:
        """The exit code (negative: the signal that killed it), or None while it lives."""
        if not select.select([self.status], [], [], timeout)[0]:
            return None
        data = os.read(self.status, NUMBER.size)
        return int(NUMBER.unpack(data)[0]) if data else -int(signal.SIGKILL)

    def kill(self) -> None:
        kill_group(self.pid)

    def close(self) -> None:
        self.pipe.close()
        os.close(self.status)


class ForkServer:
    """Starts at once, in the background; `directory` is a temporary one that goes when the server goes."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="equivtests-"))
        self._owner = os.getpid()
        self._preloaded: set[str] = set()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (self.directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(theirs.fileno(), str(self.directory)), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
            )
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def preload(self, modules: Iterable[str]) -> None:
        """Import modules in the server, once, so that ranks forked from now on have them."""
        new = [name for name in modules if name not in self._preloaded]
        if new:
            self._preloaded.update(new)
            self._send({"task": "preload", "modules": new, "path": sys.path}, [])

    def seat(self, seat: Seat) -> Child:
        """Fork a rank."""
        return self._fork({"task": "rank", "seat": asdict(seat)})

    def devices(self) -> dict[str, Any]:
        """What torch finds on this machine: its version, whether CUDA is available, the number of CUDA devices."""
        child = self._fork({"task": "devices"})
        try:
            if not child.pipe.poll(START_DEADLINE):
                raise RanksError(f"torch did not tell the devices of this machine within {START_DEADLINE:g} s")
            return dict(child.pipe.recv())
        finally:
            child.kill()
            child.close()

    def close(self) -> None:
        """Kill the ranks, end the server, remove the directory. Does nothing in a forked copy of the parent."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._socket.close()
        try:
            self._process.wait(1.0)  # it may still be importing
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _fork(self, request: dict[str, Any]) -> Child:
        ours, theirs = Pipe()
        status, status_theirs = os.pipe()
        try:
            with theirs:
                self._send(request, [theirs.fileno(), status_theirs])
        finally:
            os.close(status_theirs)
        ready = select.select([status], [], [], START_DEADLINE)[0]
        data = os.read(status, NUMBER.size) if ready else b""
        if not data:
            ours.close()
            os.close(status)
            raise RanksError(self._why())
        return Child(int(NUMBER.unpack(data)[0]), ours, status)

    def _send(self, request: dict[str, Any], files: list[int]) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        except OSError:
            pass  # the server has ended: told where its answer is awaited

    def _why(self) -> str:
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return f"the fork server did not fork a rank within {START_DEADLINE:g} s"
        log = self.directory / "server.log"
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"the fork server ended with exit code {code}: {last}"


def _environment() -> dict[str, str]:
    """One thread for every library, and a flight recorder that is small enough to be read at once."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return os.environ | threads | {"TORCH_FR_BUFFER_SIZE": "64", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
