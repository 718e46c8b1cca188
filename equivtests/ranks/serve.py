"""The fork server's process: it imports torch once, forks ranks on request, and tells when they end.

The parent holds the other end of one socket. When that closes, because the parent closed it or is no more, however it
ended, the server kills its ranks, removes the directory and ends. When the server itself dies, the kernel kills the
ranks (`_die_with` asks for that).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
NUMBER = struct.Struct("q")
"""On a status pipe: first the rank's process id, later its exit code (negative: the signal)."""


def main(socket_number: int, directory: str) -> None:
    """Serve until the socket closes."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    import equivtests.ranks.preload  # noqa: F401

    gc.freeze()
    try:
        Server(socket.socket(fileno=socket_number)).loop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Server:
    """`children` maps the process id of every living rank to its status pipe."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.pid = os.getpid()
        self.children: dict[int, int] = {}
        self.wake, self.woken_by = os.pipe()
        os.set_blocking(self.woken_by, False)
        signal.set_wakeup_fd(self.woken_by, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def loop(self) -> None:
        sources: list[Any] = [self.requests, self.wake]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap(os.WNOHANG)
            if self.requests in ready:
                message, files, _, _ = socket.recv_fds(self.requests, 65536, 2)
                if not message:
                    return self.end()
                self.serve(json.loads(message), files)

    def serve(self, request: dict[str, Any], files: list[int]) -> None:
        if request["task"] == "preload":
            preload(request["modules"], request["path"])
        else:
            self.fork(request, *files)

    def fork(self, request: dict[str, object], pipe: int, status: int) -> None:
        pid = os.fork()
        if pid == 0:
            self.become(request, pipe, status)
        lead_group(pid)
        self.children[pid] = status
        os.close(pipe)
        self.tell(status, pid)

    def become(self, request: dict[str, object], pipe: int, status: int) -> None:
        """In the child: let go of what is the server's, do the work, never return."""
        code = 1
        try:
            _die_with(self.pid)
            lead_group(os.getpid())
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (self.requests.fileno(), self.wake, self.woken_by, status, *self.children.values()):
                os.close(number)
            code = _work(request, Connection(pipe))
        except BaseException:  # noqa: BLE001 - told in the rank's log
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def reap(self, options: int) -> None:
        while self.children:
            pid, status = os.waitpid(-1, options)
            if pid == 0:
                return
            self.tell(self.children[pid], os.waitstatus_to_exitcode(status))
            os.close(self.children.pop(pid))

    def tell(self, status: int, number: int) -> None:
        try:
            os.write(status, NUMBER.pack(number))
        except BrokenPipeError:
            pass  # nobody asks any more

    def end(self) -> None:
        for pid in self.children:
            kill_group(pid)
        self.reap(0)


def preload(modules: list[str], path: list[str]) -> None:
    """Import modules before ranks are forked. One that cannot be imported is told by the ranks that need it."""
    sys.path[:] = path
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - told in the server's log
            traceback.print_exc()
    gc.collect()
    gc.freeze()


def lead_group(pid: int) -> None:
    """Give a rank a process group of its own, so that what it starts can be ended with it."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass  # it has ended


def kill_group(pid: int) -> None:
    """Kill a rank and the processes that it started, also those it left behind."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _die_with(server: int) -> None:
    """Ask the kernel to kill this process when the server ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)


def _work(request: dict[str, object], pipe: Connection) -> int:
    from equivtests.ranks import worker
    from equivtests.ranks.job import Seat

    if request["task"] == "devices":
        pipe.send(worker.devices())
        return 0
    return worker.main(Seat(**request["seat"]), pipe)  # type: ignore[arg-type]
