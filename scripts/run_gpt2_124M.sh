#!/usr/bin/env bash
# GPT-2 124M, 10 billion tokens of FineWeb, on the GPUs of one machine.
# Ends when the last step's checkpoint is there; started again, it goes on from the newest one.
# Data: .venv/bin/python dev/data/fineweb.py && .venv/bin/python dev/data/hellaswag.py
# Every setting can come from the environment: GPUS=4 OUTPUT=/big/disk/run scripts/run_gpt2_124M.sh
#
# Cost on H200: about 4.3 hours x GPUs, at 650,000 tokens/s on each
# (dev/bench/results, with RECOMPUTE=0; 1, the default, takes less memory and a little longer).
set -euo pipefail
cd "$(dirname "$0")/.."

: "${MODEL:=d12}"              # as -e takes it: random weights of this size
: "${TRAIN_DATA:=dev/data/fineweb10B/fineweb_train_*.bin}"  # dev/data/fineweb.py makes it
: "${VAL_DATA:=dev/data/fineweb10B/fineweb_val_*.bin}"  # likewise
: "${OUTPUT:=log_gpt2_124M}"   # folder for logs and checkpoints
: "${BATCH:=64}"               # sequences a GPU takes at a time (25 GiB on one GPU)
: "${SEQ_LEN:=1024}"           # tokens in a sequence
: "${TOTAL_BATCH:=524288}"     # tokens in a step over all GPUs
: "${STEPS:=19073}"            # 10 billion tokens
: "${LEARNING_RATE:=6e-4}"     # GPT-3 paper, table 2.1, "Small"
: "${WARMUP:=700}"             # steps
: "${CHECKPOINT_EVERY:=1000}"  # steps: 13 minutes on one H200

# shellcheck source=scripts/lib.sh
source scripts/lib.sh
train_here 650000 "about what an H200 does"  # tokens/s on one GPU
