#!/usr/bin/env bash
# `make demo`: from a fresh clone to a trained model. Installs what is missing, builds, fetches tiny
# Shakespeare, trains a small GPT-2, prints its losses and a sample, draws demo/loss.png. Ends with
# status 1 when the validation loss did not fall below LOSS_GOAL.
set -euo pipefail
. "$(dirname "$0")/help.sh"
if [ -n "${1:-}" ]; then
    echo "error: $1: unknown; this script takes no arguments but --help" >&2
    exit 1
fi
cd "$(dirname "$0")/.."

MODEL=custom:L4C128H4T64
BATCH=4
SEQ_LEN=64
TOKENS_PER_STEP=256
LEARNING_RATE=1e-3
WARMUP=20
STEPS=500
VAL_EVERY=50
VAL_BATCHES=20
SAMPLE_TOKENS=64
LOSS_GOAL=6.0
OUT=demo

run_make() { "${MAKE:-make}" --no-print-directory "$@"; }

say() { printf '\n== %s\n' "$*"; }

# Passes the trainer's output on; of its step lines the first and every 20th.
show_progress() {
    local line step
    while IFS= read -r line; do
        step=0
        if [[ $line =~ ^step\ +([0-9]+)/ ]]; then step=${BASH_REMATCH[1]}; fi
        if ((step % 20 == 0 || step == 1)); then printf '%s\n' "$line"; fi
    done
}

# $1 trl (training) or tel (validation): the first of these losses in the log, and the last. One
# training step is noisy, so the last is then the mean of 20 steps.
losses() {
    sed -n "s/^s:[0-9]* $1:\([^ ]*\).*/\1/p" "$OUT/main.log" | awk -v mean_of="$2" '
        { loss[NR] = $1 }
        END {
            for (i = NR; i > 0 && i > NR - mean_of; --i) { sum += loss[i]; ++count }
            printf "%.2f %.2f\n", loss[1], count ? sum / count : "nan"
        }'
}

say "1/5 install what is missing"
dev/setup.sh
run_make setup

say "2/5 build"
run_make all
trainer=./$(run_make -s print-trainer)

say "3/5 data"
run_make -s data
real_text=1
if grep -q '"text": "synthetic"' dev/data/tinyshakespeare/source.json; then
    real_text=0
    say "NOT TINY SHAKESPEARE: the text could not be had, made-up sentences stand in for it"
fi

command=("$trainer" -e "$MODEL" -b "$BATCH" -t "$SEQ_LEN" -d "$TOKENS_PER_STEP"
    -l "$LEARNING_RATE" -u "$WARMUP" -x "$STEPS" -v "$VAL_EVERY"
    -m "$VAL_BATCHES" -s "$STEPS" -g "$SAMPLE_TOKENS" -o "$OUT" -y 0)
say "4/5 train: ${command[*]}"
rm -rf "$OUT"
"${command[@]}" </dev/null | show_progress

say "5/5 draw"
.venv/bin/python dev/plot_log.py "$OUT/main.log" --out "$OUT/loss.png"

read -r train_first train_last <<<"$(losses trl 20)"
read -r val_first val_last <<<"$(losses tel 1)"
say "training loss $train_first -> $train_last, validation loss $val_first -> $val_last"
echo "log:     $OUT/main.log"
echo "picture: $OUT/loss.png"
echo "time:    $((SECONDS / 60)) min $((SECONDS % 60)) s in all"
if [ $real_text = 0 ]; then
    echo "text:    not tiny Shakespeare, so the losses compare with nothing"
elif ! awk "BEGIN { exit !($val_last > 0 && $val_last < $LOSS_GOAL) }"; then
    echo "error: validation loss $val_last did not fall below $LOSS_GOAL" >&2
    exit 1
fi
