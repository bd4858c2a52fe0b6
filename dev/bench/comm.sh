#!/usr/bin/env bash
# `make bench_comm`: starts the benchmark of communication, one process on each GPU (without one,
# two processes over the CPU stand-in). Arguments go to the program: --help lists them.
#   PROGRAM  the benchmark, such as build/cuda-bf16-cudnn/bench_comm
#   NP       processes (default: the GPUs at hand, at most 8, or 2)
#   OUT      folder for the results (default dev/bench/results; nothing is written without a GPU)
set -euo pipefail
cd "$(dirname "$0")/../.."

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
case $gpus in
    0) default=2 ;;
    1 | 2 | 3) default=$gpus ;;
    *) default=$((gpus >= 8 ? 8 : 4)) ;;
esac
NP=${NP:-$default}
json=()
if [ "$gpus" -gt 0 ] && [[ " $* " != *" --json "* ]]; then
    OUT=${OUT:-dev/bench/results}
    mkdir -p "$OUT"
    json=(--json "$OUT/comm-$(date -u +%Y-%m-%dT%H%M%SZ).json")
fi

meet=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$meet"' EXIT
for ((rank = 0; rank < NP; ++rank)); do
    "$PROGRAM" "$@" "${json[@]}" -pi fs -pn "$NP" -pr "$rank" -pg "$NP" -pf "$meet" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
pids=()
exit "$status"
