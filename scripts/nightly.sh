#!/usr/bin/env bash
# The long run: the nightly tier on many seeds, all mutants, all fixtures, the suite's own tests, the benchmarks, and outside
# frameworks in environments of their own (FRAMEWORKS=no leaves these out).
# Usage: scripts/nightly.sh      SEEDS=20 NPROC=8 PYTHON=… and PYTEST_ADDOPTS are read from the environment.
# Every stage runs, whatever the ones before it said. Exit status: 0 if all of them passed.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
seeds="${SEEDS:-20}"
nproc="${NPROC:-8}"  # three axes of two ranks
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
status=0
declare -a figures=()

# stage NAME COMMAND…: run it, keep the figure of its last line and its time
stage() {
  local name=$1 begin=$SECONDS verdict=passed
  shift
  echo "== $name: $*"
  "$@" 2>&1 | tee "$results/$name.log" || { verdict=FAILED status=1; }
  figures+=("$(printf '%-14s %-6s %5d s  %s' "$name" "$verdict" $((SECONDS - begin)) "$(grep -v '^\s*$' "$results/$name.log" | tail -n 1 | tr -d '=')")")
}

suite=("$python" -m pytest -q -p no:cacheprovider --nproc "$nproc")
stage nightly-tier "${suite[@]}" equivtests/ --tier nightly --seeds "$seeds" --certificate equivtests-certificate.json
stage mutants "${suite[@]}" equivtests/ --mutants
stage fixtures "${suite[@]}" fixtures/
stage tests "$python" -m pytest -q -p no:cacheprovider tests/
for benchmark in benchmarks/*.py; do
  if grep -q '__main__' "$benchmark"; then
    stage "$(basename "$benchmark" .py)" "$python" "$benchmark"
  fi
done

if [ "${FRAMEWORKS:-yes}" != no ]; then
  stage frameworks scripts/certify_frameworks.sh
fi

echo "== figures: nightly tier on $seeds seeds, $nproc ranks"
printf '%s\n' "${figures[@]}"
exit "$status"
