"""Ranks: every way a rank can break ends in a named verdict, in time, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from equivtests.cases.case import Case, Layout, Model
from equivtests.errors import AdapterError, RanksError
from equivtests.ranks import blame, traces
from equivtests.ranks.blame import Event
from equivtests.ranks.job import Failure, Job, Outcome, Seating
from equivtests.ranks.loading import load_adapter
from equivtests.ranks.pool import Pool
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Collective, Record

HERE = Path(__file__).parent
WORLD = 3
DEADLINE = 3.0
PATIENT = 120.0
TOKENS = (1, 2, 3)

sys.path.insert(0, str(HERE))


def case(world: int = WORLD) -> Case:
    windows = tuple((((n,),),) * world for n in TOKENS)
    return Case("ranks", Model("linear"), windows, Layout(dp=world))


def job(name: str, world: int = WORLD, **changes: object) -> Job:
    return Job(f"ranks_adapters:{name}", "sum", case(world), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    standing = Pool(WORLD, deadline=PATIENT)
    yield standing
    standing.close()


def record_of(pool: Pool, a_job: Job) -> Record:
    """Run a job that must work, however loaded the machine is."""
    pool.deadline = PATIENT
    outcome = pool.run(a_job)
    assert outcome.failure is None, outcome.failure
    assert outcome.record is not None
    return outcome.record


def failure_of(pool: Pool, name: str, deadline: float = PATIENT) -> Failure:
    pool.deadline = deadline
    outcome = pool.run(job(name))
    assert outcome.record is None
    assert outcome.failure is not None
    assert "\n" not in outcome.failure.message
    return outcome.failure


def assert_works(pool: Pool) -> None:
    record = record_of(pool, job("Summing"))
    tokens = [float(o.array[0]) for o in record.of("tokens")]
    assert tokens == [float(WORLD * n) for n in TOKENS] * WORLD


def wait_until_gone(pids: list[int], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if lives(pid)] == []


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------------------------------------- running


def test_a_record_holds_what_every_rank_showed_in_order(pool: Pool) -> None:
    record = record_of(pool, job("Summing"))
    assert record.world == WORLD
    assert [o.rank for o in record.of("tokens")] == [r for r in range(WORLD) for _ in TOKENS]
    assert record.collectives == {}


def test_stop_ends_the_feed_early(pool: Pool) -> None:
    assert len(record_of(pool, job("Summing", stop=2)).of("tokens")) == 2 * WORLD


def test_a_run_that_saves_goes_on_and_a_restored_one_meets_it(pool: Pool, tmp_path: Path) -> None:
    straight = record_of(pool, job("Saving", save_to=str(tmp_path / "saved")))
    restored = record_of(pool, job("Saving", load_from=str(tmp_path / "saved")))
    last = {"straight": straight.observations[-1], "restored": restored.observations[-1]}
    assert last["straight"].update == last["restored"].update == len(TOKENS)
    assert last["straight"].array == last["restored"].array
    assert len(restored.of("tokens")) == (len(TOKENS) - case().save_after) * WORLD


def test_ranks_stand_by_between_runs_and_fresh_ones_run_once(pool: Pool) -> None:
    assert_works(pool)
    before = [child.pid for child in pool._children.values()]
    assert_works(pool)
    assert [child.pid for child in pool._children.values()] == before
    assert pool.run_fresh(job("Summing")).failure is None
    assert pool._children == {}


def test_ranks_report_their_determinism(pool: Pool) -> None:
    assert_works(pool)
    assert pool.settings["deterministic_algorithms"] == "True"
    assert pool.settings["threads"] == "1"


def test_printing_does_not_disturb(pool: Pool) -> None:
    record_of(pool, job("Shouting"))


def test_an_unmatched_collective_does_not_reach_the_next_run(pool: Pool) -> None:
    record_of(pool, job("LeavingOneOpen"))
    assert_works(pool)


# ---------------------------------------------------------------------------------------------- breaking

BROKEN = {
    "Raising": ("raised", r"rank 1 raised ValueError: the weights are not mine \(ranks_adapters.py:\d+\) while .* 1"),
    "RaisingAndLeaving": ("raised", r"rank 1 raised ValueError: the weights are not mine"),
    "Misspelled": ("raised", r"rank 1 raised AttributeError: .*nothing"),
    "SetupFails": ("raised", r"rank \d raised RuntimeError: no such optimizer \(ranks_adapters.py:\d+\) during setup"),
    "Absent": ("raised", r"rank \d raised AdapterError: .* has no 'Absent'; adapters there: .*Summing"),
    "Unsendable": ("exited", r"rank 1 exited with status 1 while running update 2: .*pickle"),
    "Killed": ("killed", r"rank 1 was killed by SIGKILL while running update 1$"),
    "Exiting": ("exited", r"rank 1 exited with status 3 while running update 1$"),
    "SysExiting": ("exited", r"rank 1 called sys.exit\(4\) \(ranks_adapters.py:\d+\) while running update 1"),
}

STUCK = {
    "Looping": r"ranks 0, 2 wait in all_reduce at .* while rank 1 is at ranks_adapters.py:\d+ \(fault\)",
    "Sleeping": r"ranks 0, 2 wait in all_reduce at .* while rank 1 is at ranks_adapters.py:\d+ \(fault\)",
    "Skipping": r"ranks 0, 2 wait in all_reduce at .* while rank 1 has finished",
    "SkippingOnce": r"ranks 0, 2 wait in all_reduce at .* while rank 1 has finished",
    "OtherOperation": r"newest collective of rank 1 is broadcast .*, that of the others all_reduce",
    "BackwardWaiting": r"ranks 0, 2 wait in \w+ at .* while rank 1 is at ranks_adapters.py:\d+ \(fault\)",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rank_that_breaks_is_named_and_the_next_run_works(pool: Pool, name: str) -> None:
    kind, message = BROKEN[name]
    failure = failure_of(pool, name)
    assert failure.kind == kind
    assert re.search(message, failure.message), failure.message
    assert f"rank {failure.rank} " in failure.message
    assert_works(pool)


@pytest.mark.parametrize("name", STUCK)
def test_ranks_that_are_stuck_miss_the_deadline_and_the_odd_one_is_named(pool: Pool, name: str) -> None:
    assert_works(pool)
    start = time.monotonic()
    failure = failure_of(pool, name, DEADLINE)
    assert time.monotonic() - start < DEADLINE + 5
    assert (failure.kind, failure.rank) == ("deadline", 1)
    assert re.search(STUCK[name], failure.message), failure.message
    assert f"the deadline of {DEADLINE:g} s passed while running update" in failure.message
    assert sorted(failure.stacks) == sorted(failure.last_collectives) == list(range(WORLD))
    assert all("ranks_adapters.py" in failure.stacks[r] for r in (0, 2))
    assert_works(pool)


def test_mismatched_collectives_abort_some_rank_and_the_odd_one_is_shown(pool: Pool) -> None:
    """Which process gloo aborts is its own affair; the collectives of the others tell whose size differed."""
    start = time.monotonic()
    failure = failure_of(pool, "Mismatched", DEADLINE)
    assert time.monotonic() - start < DEADLINE + 5
    assert failure.kind in ("killed", "deadline", "raised")
    assert any("[4096]" in line for lines in failure.last_collectives.values() for line in lines) or failure.rank == 1
    if failure.kind == "killed":
        assert "SIGABRT" in failure.message
        assert "ranks_adapters.py" in failure.stacks[failure.rank]
    assert_works(pool)


def test_a_rank_that_only_its_victims_report_is_named(pool: Pool) -> None:
    failure = failure_of(pool, "LeavingAndSleeping")
    assert (failure.kind, failure.rank) == ("raised", 1)
    lost = "(closed by peer|Read error)"  # gloo has two words for it
    assert re.search(rf"{lost}.*; meanwhile rank 1 is at ranks_adapters.py:\d+ \(fault\)", failure.message)


def test_what_a_broken_rank_started_ends_with_it(pool: Pool) -> None:
    failure = failure_of(pool, "Spawning")
    started = re.search(r"started (\d+)", failure.message)
    assert started is not None
    wait_until_gone([int(started[1])])


def test_a_failure_shows_stacks_and_newest_collectives_of_the_living(pool: Pool) -> None:
    failure = failure_of(pool, "Raising")
    assert "ValueError" in failure.stacks[1]
    assert "all_reduce" in failure.stacks[0] and "all_reduce" in failure.stacks[2]
    assert re.fullmatch(r"all_reduce #\d+ \[1\] float32 in group 0", failure.last_collectives[0][-1])


# ---------------------------------------------------------------------------------------------- leaving nothing

SCRIPT = """
import sys
sys.path[:0] = {path!r}
import test_ranks
from equivtests.ranks.pool import Pool
assert "torch" not in sys.modules
pool = Pool(2, deadline=600.0)
assert pool.run(test_ranks.job("Summing", 2)).failure is None
assert "torch" not in sys.modules, "the main process imported torch"
print(pool._server.directory, pool._server._process.pid, *(c.pid for c in pool._children.values()), flush=True)
{then}
"""


def script(tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """A main script without a guard, in another directory, that runs a job: (process, its directory, its processes)."""
    file = tmp_path / "main.py"
    file.write_text(textwrap.dedent(SCRIPT).format(path=[str(HERE), str(HERE.parent)], then=then))
    process = subprocess.Popen(
        [sys.executable, str(file)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    words = process.stdout.readline().split()
    assert words, process.stderr.read()
    return process, Path(words[0]), [int(word) for word in words[1:]]


HANG = 'print(pool.run(test_ranks.job("Looping", 2)).failure)'


@pytest.mark.parametrize("then", ["", "pool.close()", "sys.exit(3)", "raise KeyError"])
def test_a_main_script_that_ends_leaves_nothing(tmp_path: Path, then: str) -> None:
    process, directory, pids = script(tmp_path, then)
    process.communicate(timeout=60)
    wait_until_gone(pids)
    assert not directory.exists()


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    process, directory, pids = script(tmp_path, HANG)
    time.sleep(1.0)
    for pid in (process.pid, *pids):
        os.kill(pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    wait_until_gone(pids)
    assert not directory.exists()


def test_a_killed_main_process_leaves_no_ranks_and_no_directory(tmp_path: Path) -> None:
    process, directory, pids = script(tmp_path, HANG)
    process.kill()
    process.communicate(timeout=60)
    wait_until_gone(pids)
    assert not directory.exists()


def test_a_killed_fork_server_takes_its_ranks_along_and_is_replaced() -> None:
    pool = Pool(2, deadline=PATIENT)
    try:
        record_of(pool, job("Summing", 2))
        pids = [child.pid for child in pool._children.values()]
        pool._server._process.kill()
        wait_until_gone(pids)
        record_of(pool, job("Summing", 2))
    finally:
        pool.close()


def test_closing_leaves_no_process_and_no_directory() -> None:
    pool = Pool(2, deadline=PATIENT)
    record_of(pool, job("Summing", 2))
    directory = pool._server.directory
    pids = [pool._server._process.pid, *(child.pid for child in pool._children.values())]
    files = psutil.Process().num_fds()
    for _ in range(3):
        pool.restart()
    assert psutil.Process().num_fds() == files, "restarting leaks file descriptors"
    assert len(list(directory.glob("pool-*"))) == 1
    pool.close()
    wait_until_gone(pids)
    assert not directory.exists()


def test_two_pools_work_side_by_side() -> None:
    """As under pytest-xdist: each worker has its own."""
    pools = [Pool(2, deadline=PATIENT) for _ in range(2)]
    outcomes: list[Outcome] = []

    def use(pool: Pool) -> None:
        outcomes.extend(pool.run(job("Summing", 2)) for _ in range(20))

    threads = [threading.Thread(target=use, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pool in pools:
        pool.close()
    assert [outcome.failure for outcome in outcomes] == [None] * 40


# ---------------------------------------------------------------------------------------------- collectives

WORLD_GROUP = tuple(range(WORLD))


def ledger(pool: Pool, name: str, strategy: str = "sum") -> list[Collective]:
    """The collectives that rank 0 issued."""
    return record_of(pool, Job(f"ranks_adapters:{name}", strategy, case(), ledger=True)).collectives[0]


def test_every_operation_is_recorded_with_its_group_and_full_size(pool: Pool) -> None:
    seen = [(c.operation, c.group, c.elements) for c in ledger(pool, "Operations") if c.update == 1]
    assert seen == [
        ("all_reduce", WORLD_GROUP, 2),
        ("broadcast", (0, 1), 2),
        ("all_gather", WORLD_GROUP, 2 * WORLD),
        ("reduce_scatter", WORLD_GROUP, 2 * WORLD),
        ("all_to_all", WORLD_GROUP, 2 * WORLD),
        ("reduce", WORLD_GROUP, 2),
        ("gather", WORLD_GROUP, 2 * WORLD),
        ("scatter", WORLD_GROUP, 2 * WORLD),
        ("send", (0, 1), 2),  # the two ends
        ("barrier", WORLD_GROUP, 0),
    ]


def test_functional_collectives_are_recorded_once(pool: Pool) -> None:
    seen = [(c.operation, c.elements) for c in ledger(pool, "Functional") if c.update == 1]
    expected = [("all_reduce", 2), ("all_gather", 2 * WORLD), ("reduce_scatter", 2 * WORLD)]
    assert seen[:3] == expected
    assert seen[-1] == ("all_gather", 2 * WORLD), "the DTensor's redistribution"


def test_no_collective_operator_of_this_torch_is_unknown() -> None:
    import torch
    import torch.distributed._functional_collectives

    from equivtests.ranks import collectives

    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    known = collectives._OPERATIONS.keys() | collectives._SILENT | {"_c10d_functional::batch_p2p_ops"}
    assert {n for n in names if n.startswith(("c10d::", "_c10d_functional::"))} - known == set()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", [("all_reduce", 64)]),
        ("zero1", [("all_reduce", 64), ("broadcast", 64)]),
        ("fsdp1", [("all_gather", 66), ("reduce_scatter", 66)]),
        ("fsdp2", [("all_gather", 72), ("reduce_scatter", 72)]),
    ],
)
def test_collectives_of_torchs_own_wrappers_are_seen(
    pool: Pool, strategy: str, expected: list[tuple[str, int]]
) -> None:
    """8 x 8 weights on 3 ranks: FSDP1 pads the flat parameter to 66 elements, FSDP2 the rows to 9."""
    seen = ledger(pool, "Wrapped", strategy)
    payload = [(c.operation, c.elements) for c in seen if c.update == 0]
    assert payload == expected
    assert all(c.dtype == "float32" for c in seen if c.update == 0)
    assert all(c.update == -1 for c in seen if c not in [d for d in seen if d.update >= 0])


# ---------------------------------------------------------------------------------------------- loading and asking


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ranks_adapters", "expected 'package.module:Class'"),
        (":Summing", "expected 'package.module:Class'"),
        ("ranks_adapters:Summing:x", "expected 'package.module:Class'"),
        ("not.a.module:X", "cannot import not.a.module: ModuleNotFoundError: .*looked in"),
        ("ranks_adapters:Summming", "has no 'Summming'; adapters there: .*Summing"),
        ("equivtests.cases.case:Case", "Case is no subclass of Adapter; it holds no subclass"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_explained_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(AdapterError, match=message) as error:
        load_adapter(spec)
    assert "\n" not in str(error.value)


def test_an_adapter_that_fails_to_import_tells_the_underlying_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_adapter.py").write_text("import missing_framework\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AdapterError, match="cannot import broken_adapter: ModuleNotFoundError: .*missing_framework"):
        load_adapter("broken_adapter:X")


@pytest.mark.parametrize(("module", "extra"), [("lightning_fabric", "fabric"), ("transformers", "accelerate")])
def test_a_missing_framework_is_told_with_what_to_install(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    (tmp_path / f"needs_{extra}.py").write_text(f"import {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AdapterError, match=rf"cannot import needs_{extra}: .*; pip install 'equivtests\[{extra}\]'$"):
        load_adapter(f"needs_{extra}:X")


def test_more_ranks_than_nproc_are_refused_by_name() -> None:
    pools = Pools(2)
    with pytest.raises(RanksError, match="case 'ranks' needs --nproc 3; this run has --nproc 2"):
        pools.run(job("Summing"))
    pools.close()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_missing_gpu_is_told_with_what_was_found(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """On a machine with GPUs, too: the ranks see none of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pools = Pools(3, backend=backend, device="cuda")
    try:
        with pytest.raises(RanksError, match=r"found torch [\d.]+.*, CUDA available: \w+, CUDA devices: \d+"):
            pools.run(job("Summing"))
    finally:
        pools.close()


def test_pools_keep_one_pool_per_world_on_one_server() -> None:
    pools = Pools(2, deadline=PATIENT)
    try:
        assert [pools.run(job("Summing", world)).failure for world in (1, 2, 1)] == [None] * 3
        assert sorted(pools._pools) == [(1, "torch"), (2, "torch")]
        assert pools.settings["threads"] == "1"
    finally:
        pools.close()


def test_a_framework_with_processes_of_its_own_finds_no_group_and_meets_by_agreement() -> None:
    pools = Pools(2, deadline=PATIENT)
    try:
        records = [pools.run(job("MeetingAlone", 2, seating=Seating(group="own"))).record for _ in range(2)]
    finally:
        pools.close()
    assert all(record is not None for record in records)
    told = [{o.rank: o.array.tolist() for o in record.of("inputs")} for record in records if record]
    assert told[0] == told[1] == {0: [0, 2], 1: [0, 2]}, "[is_initialized, value that rank 0 made]"


def test_ranks_have_the_variables_that_launchers_set(pool: Pool) -> None:
    record = record_of(pool, job("TellingVariables"))
    assert {o.rank: o.array.tolist() for o in record.of("inputs")} == {r: [r, r, WORLD, WORLD] for r in range(WORLD)}


def test_what_is_preloaded_is_there_before_ranks_are_forked() -> None:
    pools = Pools(2, deadline=PATIENT)
    try:
        outcomes = [
            pools.run(job("ImportedBefore", 2, seating=Seating(isolated=True, preload=modules)))
            for modules in (("tabnanny",), ("tabnanny", "no_module_of_this_name"))
        ]
    finally:
        pools.close()
    assert [o.failure for o in outcomes] == [None, None]


# ---------------------------------------------------------------------------------------------- blame


def test_a_peer_that_lost_its_connection_is_a_victim_even_if_it_tells_first() -> None:
    victim = Event(0, "raised", "raised RuntimeError: [pair.cc:538] Connection closed by peer [127.0.0.1]:3")
    cause = Event(2, "killed", "was killed by SIGKILL")
    assert blame.culprit([victim, cause]) is cause
    assert blame.culprit([victim]) is victim


def test_the_odd_collective_is_found_only_where_the_others_agree() -> None:
    assert blame.odd_one({0: ["a"], 1: ["a"], 2: ["b"]}) == 2
    assert blame.odd_one({0: ["a"], 1: ["a"], 2: []}) == 2
    assert blame.odd_one({0: ["a"], 1: ["b"]}) is None
    assert blame.odd_one({0: ["a"], 1: ["b"], 2: ["c"]}) is None
    assert blame.odd_one({0: ["a"], 1: ["a"]}) is None


def test_a_rank_that_waits_for_its_own_handle_waits(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def update():\n    handle.wait()\n")
    assert traces.doing(f'  File "{file}", line 2 in update').waits
    assert not traces.doing(f'  File "{file}", line 1 in update').waits
