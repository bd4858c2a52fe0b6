#!/usr/bin/env bash
# GPT-2 774M, 10 billion tokens of FineWeb, on the GPUs of one machine.
# Ends when the last step's checkpoint is there; started again, it goes on from the newest one.
# Data: .venv/bin/python dev/data/fineweb.py && .venv/bin/python dev/data/hellaswag.py
# Every setting can come from the environment: GPUS=4 OUTPUT=/big/disk/run scripts/run_gpt2_774M.sh
#
# Cost on H200: about 25.5 hours x GPUs, at 109,000 tokens/s on each. This size was not measured:
# these are the flops a second of 350M at 236,000 tokens/s (run_gpt2_350M.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

: "${MODEL:=d36}"             # as -e takes it: random weights of this size
: "${TRAIN_DATA:=dev/data/fineweb10B/fineweb_train_*.bin}"  # dev/data/fineweb.py makes it
: "${VAL_DATA:=dev/data/fineweb10B/fineweb_val_*.bin}"  # likewise
: "${OUTPUT:=log_gpt2_774M}"  # folder for logs and checkpoints
: "${BATCH:=32}"              # sequences a GPU takes at a time (54 GiB on one GPU)
: "${SEQ_LEN:=1024}"          # tokens in a sequence
: "${TOTAL_BATCH:=524288}"    # tokens in a step over all GPUs
: "${STEPS:=19073}"           # 10 billion tokens
: "${LEARNING_RATE:=2.5e-4}"  # GPT-3 paper, table 2.1, "Large"
: "${WARMUP:=700}"            # steps
: "${CHECKPOINT_EVERY:=250}"  # steps: 20 minutes on one H200

# shellcheck source=scripts/lib.sh
source scripts/lib.sh
train_here 109000 "computed from 350M's flops a second on an H200"  # tokens/s on one GPU
