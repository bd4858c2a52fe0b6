#!/usr/bin/env bash
# GPT-3 125M, 300 billion tokens of FineWeb, on the GPUs of one machine.
# Ends when the last step's checkpoint is there; started again, it goes on from the newest one.
# Data, with .venv/bin/python: dev/data/fineweb.py --sample 100BT and dev/data/hellaswag.py
# Every setting can come from the environment: GPUS=4 OUTPUT=/big/disk/run scripts/run_gpt3_125M.sh
#
# Cost on H200: about 137.3 hours x GPUs, at 607,000 tokens/s on each; 4.6 for 10 billion tokens
# (STEPS=19073). T = 2048 was not measured: these are the flops a second of GPT-2 124M at 650,000
# tokens/s (run_gpt2_124M.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

: "${MODEL:=gpt3:c768}"        # as -e takes it: random weights of this size
: "${TRAIN_DATA:=dev/data/fineweb100B/fineweb_train_*.bin}"  # dev/data/fineweb.py --sample 100BT
: "${VAL_DATA:=dev/data/fineweb100B/fineweb_val_*.bin}"  # likewise
: "${OUTPUT:=log_gpt3_125M}"   # folder for logs and checkpoints
: "${BATCH:=32}"               # sequences a GPU takes at a time (25 GiB on one GPU)
: "${SEQ_LEN:=2048}"           # tokens in a sequence
: "${TOTAL_BATCH:=524288}"     # tokens in a step over all GPUs
: "${STEPS:=572204}"           # 300 billion tokens
: "${LEARNING_RATE:=6e-4}"     # GPT-3 paper, table 2.1, "Small"
: "${WARMUP:=715}"             # steps: 375 million tokens, appendix B
: "${FINAL_LR_FRACTION:=0.1}"  # appendix B, there after 260 billion tokens
: "${CHECKPOINT_EVERY:=1000}"  # steps: 14 minutes on one H200

# shellcheck source=scripts/lib.sh
source scripts/lib.sh
train_here 607000 "computed from GPT-2 124M's flops a second on an H200"  # tokens/s on one GPU
