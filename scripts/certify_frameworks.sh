#!/usr/bin/env bash
# Certify released frameworks, each in an environment of its own, and write docs/conformance.md.
# Usage: scripts/certify_frameworks.sh [NAME …]     names: deepspeed fabric accelerate trainer jax megatron (default: all)
#
# Read from the environment: PYTHON (python3), ENVIRONMENTS (.frameworks: where environments are made and kept), RESULTS
# (.frameworks/results: certificates and logs; those of frameworks that are not named are kept, and stand in the page).
# Exit status: 0 if everything is as declared.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
environments="${ENVIRONMENTS:-.frameworks}"
results="${RESULTS:-.frameworks/results}"
mkdir -p "$environments" "$results"
environments=$(cd "$environments" && pwd) results=$(cd "$results" && pwd)
declare -A extra=([deepspeed]=deepspeed [fabric]=fabric [accelerate]=accelerate [trainer]=accelerate [jax]=jax [megatron]=megatron)
declare -A adapters=(
  [deepspeed]="deepspeed:DeepSpeed deepspeed_pipeline:DeepSpeedPipeline deepspeed_tensor:DeepSpeedTensor"
  [fabric]="fabric:Fabric fabric_tensor:FabricTensor"
  [accelerate]="accelerate:Accelerate accelerate_accumulate:AccelerateAccumulate"
  [trainer]="trainer:Trainer"
  [jax]="jax:JAX jax_tensor:JAXTensor"
  [megatron]="megatron:Megatron"
)
declare -A worlds=([megatron]="4") # of the others 2 and 4; it has no case on 2 ranks
status=0

# environment EXTRA: make it once; its python is printed
environment() {
  local home="$environments/$1"
  [ -x "$home/bin/python" ] || "$python" -m venv "$home" || return 1
  "$home/bin/pip" install -q --disable-pip-version-check -c constraints.txt -e ".[$1,test]" >&2 || return 1
  echo "$home/bin/python"
}

# suite NAME PYTHON OPTIONS…: pytest on the adapters of a framework
suite() {
  local interpreter=$2 spec
  local -a chosen=()
  for spec in ${adapters[$1]}; do chosen+=(--adapter "equivtests.adapters.$spec"); done
  shift 2
  "$interpreter" -m pytest -q -p no:cacheprovider "${chosen[@]}" "$@" equivtests/
}

# certified NAME PYTHON RANKS: the default tier; the certificate tells
certified() {
  local name=$1 begin=$SECONDS
  suite "$name" "$2" --nproc "$3" --certificate "$results/$name-$3.json" >"$results/$name-$3.log" 2>&1 || status=1
  printf '%-12s %s ranks  %4d s  %s\n' "$name" "$3" $((SECONDS - begin)) "$(tail -n 1 "$results/$name-$3.log")"
}

# mutants NAME PYTHON: the mistakes planted in an adapter
mutants() {
  local name=$1 log="$results/$1-mutants.log"
  suite "$name" "$2" --nproc 4 --mutants >"$log" 2>&1 || status=1
  sed -n 's/^mutants: \(.*\) killed of \(.*\) planted$/\1 of \2/p' "$log" >"$results/$name.mutants"
  printf '%-12s mutants killed: %s\n' "$name" "$(cat "$results/$name.mutants")"
}

# records NAME PYTHON CASE LAUNCH…: what a program that does not import equivtests writes is judged, the right and the naive one
records() {
  local name=$1 interpreter=$2 case=$3 directory
  shift 3
  directory=$(mktemp -d)
  "$interpreter" -m equivtests export "$directory/case" --case "$case" >/dev/null || status=1
  "$@" "$directory/case" "$directory/right" >"$results/$name-record.log" 2>&1 || status=1
  "$@" "$directory/case" "$directory/naive" --naive >>"$results/$name-record.log" 2>&1 || status=1
  "$interpreter" -m equivtests judge "$directory/right" >"$directory/right.txt" 2>&1 || status=1
  if "$interpreter" -m equivtests judge "$directory/naive" >"$directory/naive.txt" 2>&1; then status=1; fi
  grep -q "denominator = rank-microbatch" "$directory/naive.txt" || status=1
  head -n 1 "$directory/right.txt" >"$results/$name on $case.record"
  { head -n 1 "$directory/naive.txt" && grep -m 1 "denominator = rank-microbatch" "$directory/naive.txt"; } | tr -s '\n ' ' ' \
    >"$results/$name on $case, mean of local means.record"
  printf '%-12s record: %s\n' "$name" "$(cat "$results/$name on $case.record")"
  rm -rf "$directory"
}

# jax_ranks PYTHON WORLD CASE RECORD [--naive]: one process per rank, as JAX has no launcher of its own
jax_ranks() {
  local interpreter=$1 world=$2 port rank failed=0
  shift 2
  port=$("$interpreter" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
  local -a processes=()
  for ((rank = 0; rank < world; rank++)); do
    "$interpreter" docs/examples/record_jax.py "$1" "$2" "$rank" "localhost:$port" ${3:+"$3"} &
    processes+=($!)
  done
  for rank in "${processes[@]}"; do wait "$rank" || failed=1; done
  return "$failed"
}

for name in "$@"; do
  [ -n "${extra[$name]:-}" ] || { echo "$name: unknown; known are ${!extra[*]}" >&2; exit 2; }
done
[ $# -gt 0 ] || set -- deepspeed fabric accelerate trainer jax megatron
for name in "$@"; do
  interpreter=$(environment "${extra[$name]}") || { echo "$name: no environment" >&2; status=1; continue; }
  for world in ${worlds[$name]:-2 4}; do certified "$name" "$interpreter" "$world"; done
  mutants "$name" "$interpreter"
  case "$name" in
    fabric) records "plain torch" "$interpreter" gpt-adamw-w4 \
      "$interpreter" -m torch.distributed.run --standalone --nproc-per-node 4 docs/examples/record_torch.py ;;
    jax) records "JAX" "$interpreter" linear-sgd-w2 jax_ranks "$interpreter" 2 ;;
  esac
done
"$interpreter" scripts/conformance.py "$results" docs/conformance.md || status=1
exit "$status"
