#!/usr/bin/env bash
# The checks of several GPUs of one host, on as many as there are (2, 4 or 8), and a summary.
#   dev/bench/four_gpus.sh [PART ...]    parts: grade equal killed comm scaling; without any, all
#
# grade    ./grade A4
# equal    the same bits on 1, 2, 4 GPUs: bf16 with cuDNN and with our own attention, fp32; NCCL's
#          algorithm its own choice, Ring, and Tree where there is one
# killed   kill -9 of a rank in mid-step: the others end, and name it
# comm     make bench_comm
# scaling  tokens a second on 1, 2, 4 GPUs with ZeRO-1, and the share of linear
#
# Needs the builds of `dev/gpu_check.sh build`, and makes them where they are missing.
#   OUT      folder for the results as JSON (default dev/bench/results)
#   LOGS     folder for what the parts print (default build/four_gpus)
#   STRICT   1: a missed target of bandwidth or speed is a failure, too
#   CARRY, COMMIT   see dev/gpu_variables.sh
#   LLMC_BUILD_DIR  folder of the builds (default build)
# NCCL_NVLS_ENABLE=0 is kept where it is set: all that is compared runs in this environment.
set -uo pipefail
. "$(dirname "$0")/../help.sh"
cd "$(dirname "$0")/../.." || exit
export PATH=$PATH:/usr/local/cuda/bin
OUT=${OUT:-dev/bench/results}
LOGS=${LOGS:-build/four_gpus}
STRICT=${STRICT:-0}
parts=("$@")
[ $# -gt 0 ] || parts=(grade equal killed comm scaling)
for part in "${parts[@]}"; do
    case $part in
        grade | equal | killed | comm | scaling) ;;
        *)
            echo "error: $part: must be grade, equal, killed, comm or scaling" >&2
            exit 1
            ;;
    esac
done
if [ "$STRICT" != 0 ] && [ "$STRICT" != 1 ]; then
    echo "error: STRICT=$STRICT: must be 0 or 1" >&2
    exit 1
fi
date=$(date -u +%Y-%m-%dT%H%M%SZ)
summary=()
failed=0

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" -lt 2 ]; then
    echo "error: $gpus GPUs here, two are needed" >&2
    exit 1
fi
nvidia-smi -L
env | grep '^NCCL_' | sort

. dev/gpu_variables.sh OUT LOGS || exit 1
mkdir -p -- "$OUT" "$LOGS" || exit 1
build=${LLMC_BUILD_DIR:-build}
find_bf16() {
    bf16=$build/cuda-bf16-cudnn
    [ -d "$bf16" ] || bf16=$build/cuda-bf16
}
find_bf16

# step NAME COMMAND ...: runs a command into its log; its time, and how it ended, for the summary.
step() {
    local name=$1 start=$SECONDS status=0 line log
    log=$LOGS/${name// /-}.log
    shift
    echo "== $name: $*"
    "$@" >"$log" 2>&1 || status=$?
    line=$(printf '%-34s %4d s  ' "$name" $((SECONDS - start)))
    if [ $status = 0 ]; then
        summary+=("$line ok")
    else
        summary+=("$line FAILED ($status), $log")
        failed=1
    fi
    tail -n 40 "$log"
    return "$status"
}

many() { python3 test/test_many_gpus.py "$@"; }

for program in "$bf16"/{train_gpt2cu,bench_comm} "$build"/cuda-{bf16,fp32}/train_gpt2cu; do
    if [ ! -x "$program" ]; then
        step "build" dev/gpu_check.sh build || exit 1
        find_bf16
        break
    fi
done

for part in "${parts[@]}"; do
    case $part in
        grade)
            step "build of grade" make -j REPORT=0 "${variables[@]}" PRECISION=BF16 \
                "$bf16/grade_checks" &&
                step "grade A4" ./grade A4 --trainer "$bf16/train_gpt2cu" \
                    --checks "$bf16/grade_checks"
            ;;
        equal)
            # Only all-reduces have trees; the others stay rings.
            for algorithm in "" Ring "ring;allreduce:tree"; do
                name=${algorithm:-unset}
                name=${name##*:}
                if [ -n "$algorithm" ]; then export NCCL_ALGO=$algorithm; else unset NCCL_ALGO; fi
                step "equal NCCL_ALGO $name" many --only /tcp --json "$OUT/equal-$name-$date.json"
            done
            unset NCCL_ALGO
            ;;
        killed) step "killed" many --only Killed --json "$OUT/killed-$date.json" ;;
        comm)
            step "bench_comm" env PROGRAM="$bf16/bench_comm" OUT="$OUT" \
                dev/bench/comm.sh --strict "$STRICT"
            ;;
        scaling)
            strict=()
            [ "$STRICT" = 0 ] || strict=(--strict)
            step "scaling" python3 dev/bench/scaling.py --trainer "$bf16/train_gpt2cu" --no-plain \
                --works d12 d12-262144 d48 --out "$OUT" ${COMMIT:+--commit "$COMMIT"} \
                "${strict[@]}"
            ;;
    esac
done

echo
printf '%s\n' "$gpus GPUs" "${summary[@]}"
python3 - "$OUT/several-gpus-$date.json" "$gpus" "$failed" "${summary[@]}" <<'PYTHON'
import json
import subprocess
import sys

path, gpus, failed, *lines = sys.argv[1:]
query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
gpu = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]
record = {"gpu": gpu, "gpus": int(gpus), "all_ok": failed == "0", "summary": lines}
with open(path, "w", encoding="utf-8") as file:
    file.write(json.dumps(record, indent=1) + "\n")
print("wrote", path)
PYTHON
exit $failed
