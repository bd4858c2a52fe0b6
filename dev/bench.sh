#!/usr/bin/env bash
# `make bench`: speed of one training step on this machine. Takes the median over the steps, the
# first ones left out; repeat on a quiet machine before comparing.
#   TRAINER  program to measure (default ./train_gpt2cpu)
#   ARGS     its model and batch
set -euo pipefail
cd "$(dirname "$0")/.."

TRAINER=${TRAINER:-./train_gpt2cpu}
ARGS=${ARGS:--e custom:L4C128H4T64 -b 4 -t 64 -d 256}
STEPS=${STEPS:-25}
WARMUP_STEPS=5

# shellcheck disable=SC2086  # ARGS is several words
set -- "$TRAINER" $ARGS -x "$STEPS" -v 0 -s 0
grep -m1 -E '^(model name|Model)' /proc/cpuinfo || true
nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true
"$TRAINER" --version
echo "$*"
"$@" </dev/null | sed -n 's/^step .*| \([0-9.]*\) ms .* \([0-9]*\) tok\/s.*/\1 \2/p' |
    tail -n +$((WARMUP_STEPS + 1)) | sort -n |
    awk '{ ms[NR] = $1; rate[NR] = $2 }
         END {
             if (NR == 0) { print "error: no step was measured" > "/dev/stderr"; exit 1 }
             m = int((NR + 1) / 2)
             printf "median of %d steps: %s ms, %s tok/s (fastest %s ms, slowest %s ms)\n",
                    NR, ms[m], rate[m], ms[1], ms[NR]
         }'
