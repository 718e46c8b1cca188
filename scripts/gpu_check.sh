#!/usr/bin/env bash
# What a machine with a GPU adds to the CPU suite, in less than four minutes:
#   1. NCCL with one rank; with two GPUs or more, NCCL with a rank on each of up to four;
#   2. gloo ranks that share one GPU: all kernels run on CUDA, the reductions go through gloo (strategies that only all-reduce).
# Usage: scripts/gpu_check.sh        PYTHON=… chooses the interpreter.
# Exit status: 0 all passed, 1 something did not, 2 no GPU or no torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"

refuse() {
  echo "gpu_check: $1; nothing was checked" >&2
  exit 2
}

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)' 2>/dev/null) \
  || refuse "$python cannot import torch (choose another with PYTHON=…)"
[ "$gpus" -gt 0 ] || refuse "torch finds no CUDA device"

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
status=0

# part NAME SECONDS PYTEST-OPTIONS…: one run of the suite with a deadline of its own
part() {
  local name=$1 seconds=$2
  shift 2
  echo "== $name"
  timeout --kill-after=10 "$seconds" "$python" -m pytest equivtests/ -q -p no:cacheprovider --device cuda --tier quick \
    --deadline 20 --certificate "$results/$name.json" "$@" || status=1
}

part nccl-one-rank 60 --backend nccl --nproc 1 --strategy dp --strategy ddp --strategy fsdp2
if [ "$gpus" -ge 2 ]; then
  part nccl-many-ranks 80 --backend nccl --nproc "$((gpus < 4 ? gpus : 4))"
fi
part gloo-shared-gpu 80 --backend gloo --nproc 2 --strategy dp --strategy ddp --strategy ddp-no-sync

GPUS="$gpus" STATUS="$status" SECONDS_TAKEN="$SECONDS" "$python" - "$results" <<'PYTHON'
import json, os, pathlib, sys, torch

found = [json.loads(path.read_text())["all"]["counts"] for path in pathlib.Path(sys.argv[1]).glob("*.json")]
sums = {name: sum(counts[name] for counts in found) for name in ("declared", "run", "passed", "known")}
print(
    f"gpu_check: {'passed' if os.environ['STATUS'] == '0' else 'FAILED'}: {sums['passed'] + sums['known']} of {sums['declared']} runs"
    f" passed, {sums['run']} ran, {len(found)} parts, {os.environ['GPUS']} GPU(s) ({torch.cuda.get_device_name(0)}),"
    f" torch {torch.__version__}, {os.environ['SECONDS_TAKEN']} s"
)
PYTHON
exit "$status"
