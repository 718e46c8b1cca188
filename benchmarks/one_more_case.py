"""One more case against one more test of torch's MultiProcessTestCase, with the same trivial step on four ranks.

Both costs are marginal: (time of MANY - time of ONE) / (MANY - ONE). Prints the ratio; the bar is 100.
Needs `expecttest`, which torch's own test base imports. Run: python benchmarks/one_more_case.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from equivtests.cases.case import Case, Layout, Model
from equivtests.ranks.job import Job
from equivtests.ranks.pools import Pools

BAR = 100.0
JOBS = 200
CASE = Case("trivial", Model("linear"), ((((8,),), ((3,),), ((5,),), ((2,),)),), Layout(4))

THEIRS = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

class Trivial(MultiProcessTestCase):
    world_size = 4
    def setUp(self):
        super().setUp()
        self._spawn_processes()

def step(self):
    torch.set_num_threads(1)
    store = dist.FileStore(self.file_name, self.world_size)
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
    weight = torch.ones(3, 5, requires_grad=True)
    (torch.ones(8, 5) @ weight.T).square().sum().backward()
    dist.all_reduce(weight.grad)
    assert weight.grad.shape == (3, 5)
    dist.destroy_process_group()

import os
for i in range(int(os.environ["TESTS"])):
    setattr(Trivial, f"test_{i}", step)

if __name__ == "__main__":
    run_tests()
"""


def theirs(tests: int, script: Path) -> float:
    """Seconds of a run of torch's test case with so many tests."""
    script.write_text(THEIRS)
    start = time.perf_counter()
    environment = {"TESTS": str(tests), "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"torch's test case failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


def ours() -> float:
    """Marginal seconds of a job on a standing pool: one linear layer, one all-reduced step, everything recorded."""
    job = Job("equivtests.adapters.textbook.dp:DataParallel", "dp", CASE)
    with closing(Pools(4)) as pools:
        for _ in range(5):
            pools.run(job)
        start = time.perf_counter()
        for _ in range(JOBS):
            outcome = pools.run(job)
            assert outcome.record is not None, outcome.failure
        return (time.perf_counter() - start) / JOBS


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "their_test.py"
        marginal = (theirs(3, script) - theirs(1, script)) / 2
    mine = ours()
    print(f"MultiProcessTestCase: {marginal:.2f} s per test; a case here: {1e3 * mine:.1f} ms")
    print(f"one more case is {marginal / mine:.0f} times cheaper (bar {BAR:.0f})")
    return 0 if marginal / mine >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
