#!/usr/bin/env bash
# `make bench_comm`: starts the benchmark of communication, one process on each GPU (without one,
# two processes over the CPU stand-in). Arguments go to the program: --help lists them.
#   PROGRAM  the benchmark, such as build/cuda-bf16-cudnn/bench_comm
#   NP       processes (default: the GPUs at hand, at most 8, or 2)
#   OUT      folder for the results (default dev/bench/results; nothing is written without a GPU)
set -euo pipefail
if [[ " $* " == *" --help "* && -z ${PROGRAM:-} ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")/../.."
if [ ! -f "${PROGRAM:-}" ] || [ ! -x "$PROGRAM" ]; then
    echo "error: PROGRAM=${PROGRAM:-}: must be the benchmark; make bench_comm builds it" >&2
    exit 1
fi
if [[ " $* " == *" --help "* ]]; then exec "$PROGRAM" --help; fi

gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
case $gpus in
    0) default=2 ;;
    1 | 2 | 3) default=$gpus ;;
    *) default=$((gpus >= 8 ? 8 : 4)) ;;
esac
NP=${NP:-$default}
if ! [[ $NP =~ ^[1-9][0-9]?$ ]]; then
    echo "error: NP=$NP: must be a whole number from 1 to 99" >&2
    exit 1
fi
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
