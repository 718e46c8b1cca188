"""Ranks that somebody else launched give the verdicts of the pool, and are named like those of the pool when they break."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from equivtests.cases.case import Case, dumps
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Run
from equivtests.errors import RanksError
from equivtests.mutants.situations import TWO_BY_THREE
from equivtests.ranks import leader
from equivtests.ranks.launch import Launch, first_host, launch_of
from equivtests.ranks.pools import Pools

HERE = Path(__file__).parent
BREAKING = "breaking_adapters:Breaking"
PATIENT = 300.0

sys.path.insert(0, str(HERE))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**variables: object) -> dict[str, str]:
    return (
        os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"} | {name: str(value) for name, value in variables.items()}
    )


@contextmanager
def started(*commands: tuple[list[str], dict[str, str]], where: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes in groups of their own, which are killed if they are still there."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command], env=variables, cwd=where, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for command, variables in commands
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            with process:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def outputs(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit status, standard output, standard error) of each."""
    told = [process.communicate(timeout=PATIENT) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, told, strict=True)]


def torchrun(*options: str) -> list[str]:
    return ["-m", "torch.distributed.run", *options, "-m", "equivtests"]


@pytest.fixture
def case_file(tmp_path: Path) -> Path:
    path = tmp_path / "case.json"
    path.write_text(dumps(TWO_BY_THREE))
    return path


def in_the_pool(case: Case, deadline: float) -> dict[str, list[str]]:
    """First line of the explanation, or the verdict, of every strategy of the breaking adapter on our own ranks."""
    with closing(Pools(2, deadline=deadline)) as pools:
        results = [certify(pools, Run("update", BREAKING, s, case)) for s in claims_of(BREAKING).strategies]
    return {r.run.strategy.name: r.explanation[:1] for r in results}


# ---------------------------------------------------------------------------------------------- torchrun


def test_ranks_under_torchrun_are_judged_and_named_as_in_the_pool(tmp_path: Path, case_file: Path) -> None:
    deadline = 10.0
    command = ["run", str(case_file), "--adapter", BREAKING, "--deadline", f"{deadline:g}"]
    launch = (torchrun("--standalone", "--nproc-per-node", "2") + command, environment())
    with started(launch, where=tmp_path) as processes:
        [(status, output, errors)] = outputs(processes)
    assert status == 1, errors
    expected = in_the_pool(TWO_BY_THREE, deadline)
    assert "PASS         works-two-by-three" in output
    assert set(expected) == {"works", "raises", "killed", "hangs"} and not expected["works"]
    for lines in expected.values():
        assert all(line in output for line in lines), (lines, output)
    assert output.count("works-two-by-three") == 1, "one process of the launch speaks"


def test_two_nodes_certify_a_strategy_as_the_pool_does(tmp_path: Path) -> None:
    options = ["certify", "--tier", "quick", "--strategy", "dp", "--certificate", "c.json", "--deadline", "120"]
    address = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    nodes = [(torchrun(*address, "--node-rank", str(node)) + options, environment()) for node in range(2)]
    with started(*nodes, where=tmp_path) as processes:
        ended = outputs(processes)
    assert [status for status, _, _ in ended] == [0, 0], ended
    launched = json.loads((tmp_path / "c.json").read_text())
    alone = (["-m", "equivtests", *options[:-4], "--nproc", "2", "--certificate", "d.json"], environment())
    with started(alone, where=tmp_path) as processes:
        assert outputs(processes)[0][0] == 0
    pooled = json.loads((tmp_path / "d.json").read_text())
    on_two = [run for run in pooled["runs"] if run["case"].endswith("-w2")]
    assert launched["complete"] and launched["runs"] == on_two and len(on_two) >= 3
    assert launched["selection"]["settings"] == pooled["selection"]["settings"]


# ---------------------------------------------------------------------------------------------- other launchers


def slurm(rank: int, world: int, port: int) -> dict[str, str]:
    """What srun sets for a task."""
    return environment(
        SLURM_JOB_ID=7, SLURM_STEP_ID=0, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NTASKS=world, SLURM_NODEID=0,
        SLURM_STEP_TASKS_PER_NODE=world, SLURM_STEP_NODELIST="127.0.0.1", MASTER_PORT=port,
    )  # fmt: skip


def test_tasks_of_slurm_meet_without_any_other_launcher(tmp_path: Path, case_file: Path) -> None:
    port = free_port()
    command = ["-m", "equivtests", "run", str(case_file), "--strategy", "dp", "--deadline", "120"]
    with started(*((command, slurm(rank, 2, port)) for rank in range(2)), where=tmp_path) as processes:
        ended = outputs(processes)
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert "PASS         dp-two-by-three" in ended[0][1] and ended[1][1] == ""


def test_a_launched_process_that_is_killed_is_named_by_rank_0(tmp_path: Path, case_file: Path) -> None:
    """No launcher looks after these two: rank 0 finds by itself that the other process gives no sign of life."""
    port = free_port()
    command = ["-m", "equivtests", "run", str(case_file), "--adapter", BREAKING, "--strategy", "hangs"]
    command += ["--deadline", "120"]
    sign = tmp_path / "hanging"
    tasks = ((command, slurm(rank, 2, port) | {"BREAKING_SIGN": str(sign)}) for rank in range(2))
    with started(*tasks, where=tmp_path) as processes:
        wait_for(sign)
        os.killpg(processes[1].pid, signal.SIGKILL)
        status, output, errors = outputs(processes[:1])[0]
    assert status == 1, errors
    assert "hangs on two-by-three: rank 1 is gone, with the process that was launched for it" in output


def wait_for(path: Path) -> None:
    limit = time.monotonic() + PATIENT
    while not path.exists():
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_bad_input_ends_every_launched_process_with_one_line(tmp_path: Path) -> None:
    port = free_port()
    command = ["-m", "equivtests", "certify", "--adapter", "nowhere:Nobody"]
    with started(*((command, slurm(rank, 2, port)) for rank in range(2)), where=tmp_path) as processes:
        ended = outputs(processes)
    assert [status for status, _, _ in ended] == [2, 2]
    assert ended[0][2].startswith("equivtests: adapter 'nowhere:Nobody': cannot import nowhere")
    assert ended[1][2] == ""


def test_a_case_of_another_world_is_refused(tmp_path: Path, case_file: Path) -> None:
    command = ["-m", "equivtests", "run", str(case_file), "--strategy", "dp"]
    with started((command, slurm(0, 1, free_port())), where=tmp_path) as processes:
        [(status, _, errors)] = outputs(processes)
    assert (status, errors.strip()) == (2, "equivtests: case 'two-by-three' needs 2 ranks, but 1 were launched")


def test_ranks_that_never_came_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "START_DEADLINE", 0.5)
    with pytest.raises(RanksError, match=r"ranks 1, 2 of 3 did not come to 127.0.0.1:\d+: start all of them"):
        leader.meet(Launch(0, 3, 0, 3, 0, "127.0.0.1", free_port()))


# ---------------------------------------------------------------------------------------------- variables


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
RAY = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"}
RAY |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}
SRUN |= {"SLURM_JOB_ID": "12345", "SLURM_STEP_NODELIST": "node[0-1]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize("variables", [TORCHRUN, RAY, SRUN], ids=["torchrun", "ray", "slurm"])
def test_every_launcher_says_the_same_in_its_own_words(variables: dict[str, str]) -> None:
    launch = launch_of(variables)
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world, launch.node) == (5, 8, 1, 4, 1)
    assert launch.address == "node0" and 1024 < launch.port < 65536
    told = launch.variables
    assert all(told[name] == variables[name] for name in told if name in variables)


def test_without_a_launcher_nothing_is_launched() -> None:
    assert launch_of({}) is None
    assert launch_of({"RANK": "0", "WORLD_SIZE": "4"}) is None, "no address: not a launcher's variables"
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert launch_of(batch) is None, "a batch script outside of srun is one process, not a task"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"RANK": "9"}, "RANK is 9 and WORLD_SIZE 8"), ({"MASTER_PORT": "x"}, "not a number: .*'x'")],
)
def test_variables_that_make_no_sense_are_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(RanksError, match=words):
        launch_of(TORCHRUN | change)


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("gpu[03-07,9],login1", "gpu03"), ("n[1,4]", "n1")]
)
def test_the_first_host_of_a_compressed_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
