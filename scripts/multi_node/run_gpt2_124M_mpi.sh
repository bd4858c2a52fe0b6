#!/usr/bin/env bash
# GPT-2 124M on several machines by OpenMPI's mpirun: over a host file, within an allocation of
# Slurm (salloc or sbatch), or on this machine alone.
#   HOSTFILE=hosts scripts/multi_node/run_gpt2_124M_mpi.sh
# Data: .venv/bin/python dev/data/fineweb.py && .venv/bin/python dev/data/hellaswag.py
# Settings can come from the environment. More settings: scripts/lib.sh. See docs/multi_node.md.
# shellcheck disable=SC2317  # start is called by its name
set -euo pipefail

: "${REPO:=}"                          # the repository, shared by all hosts; empty: found out
: "${BINARY:=./train_gpt2cu}"          # the trainer
: "${OUTPUT:=log_gpt2_124M_mpi}"       # logs and checkpoints, in a folder that all nodes share
: "${TRAIN_DATA:=dev/data/fineweb10B/fineweb_train_*.bin}"  # dev/data/fineweb.py makes it
: "${VAL_DATA:=dev/data/fineweb10B/fineweb_val_*.bin}"  # likewise
: "${MODEL:=d12}"                      # as -e takes it: random weights of this size
: "${BATCH:=32}"                       # sequences a GPU takes at a time
: "${SEQ_LEN:=1024}"                   # tokens in a sequence
: "${TOTAL_BATCH:=524288}"             # tokens in a step: a multiple of BATCH x SEQ_LEN x all GPUs
: "${REDUCTION_WIDTH:=16}"             # same bits on every number of GPUs that divides it
: "${STEPS:=19073}"                    # 10 billion tokens
: "${LEARNING_RATE:=6e-4}"             # GPT-3 paper, table 2.1, "Small"
: "${WARMUP:=700}"                     # steps
: "${CHECKPOINT_EVERY:=500}"           # steps
: "${HOSTFILE:=}"                      # such as: node1 slots=8; empty: the allocation's, or here
: "${GPUS_PER_NODE:=}"                 # processes a host; empty: as many as it has slots, or GPUs
: "${MPIRUN:=mpirun}"                  # OpenMPI's
: "${MPIRUN_FLAGS:=}"                  # more flags for it, separated by spaces

# ---- nothing to edit below
if [ -z "$REPO" ]; then
    REPO=$(dirname "$0")/../..
    # sbatch runs a copy of this script from a folder of its own.
    [ -f "$REPO/scripts/lib.sh" ] || REPO=${SLURM_SUBMIT_DIR:-.}
fi
if ! cd -- "$REPO" 2>/dev/null || [ ! -f scripts/lib.sh ]; then
    echo "error: REPO=$REPO: not the repository; start in its root folder, or set REPO to it" >&2
    exit 1
fi
# shellcheck source=scripts/lib.sh
source scripts/lib.sh
# shellcheck source=scripts/multi_node/slurm.sh
source scripts/multi_node/slurm.sh

# mpirun with its own flags: how many processes, and which of them go where.
mpirun_command() {
    local nodes=1 slots="" given=$GPUS_PER_NODE variables flags name
    if [ -n "$HOSTFILE" ]; then
        if [ ! -f "$HOSTFILE" ] || [ ! -r "$HOSTFILE" ]; then
            fail "HOSTFILE=$HOSTFILE: cannot be read"
        fi
        nodes=$(grep -cE '^[[:space:]]*[^#[:space:]]' "$HOSTFILE") ||
            fail "HOSTFILE=$HOSTFILE: no hosts"
        slots=$(sed -nE '/^[[:space:]]*[^#[:space:]]/{
            s/^[^#]*[[:space:]]slots=([0-9]*).*/\1/; t number
            s/.*/none/; : number
            p; }' "$HOSTFILE" | sort -u)
        [[ $slots != *$'\n'* ]] ||
            fail "HOSTFILE=$HOSTFILE: all hosts must have the same number of slots=, or none any"
        if [ "$slots" != none ]; then : "${GPUS_PER_NODE:=$slots}"; fi
    elif [ -n "${SLURM_JOB_ID:-}" ]; then
        check_job SLURM_NNODES
        nodes=$SLURM_NNODES
        GPUS_PER_NODE=$(job_gpus_per_node)
    fi
    : "${GPUS_PER_NODE:=$(gpus_here)}"
    [ -n "$given${slots#none}" ] || [ "$GPUS_PER_NODE" != 0 ] ||
        fail "no GPUs found; set GPUS_PER_NODE to the processes of each host"
    check_number GPUS_PER_NODE 1 256
    command -v "$MPIRUN" >/dev/null || fail "MPIRUN=$MPIRUN: no such program"
    read -ra flags <<<"$MPIRUN_FLAGS"
    mpirun=("$MPIRUN" -np $((nodes * GPUS_PER_NODE)) --map-by "ppr:$GPUS_PER_NODE:node"
        --bind-to none ${HOSTFILE:+--hostfile "$HOSTFILE"} "${flags[@]}")
    # mpirun hands no variables on to other machines unless told to.
    export LLMC_JOB_TOKEN=
    mapfile -t variables < <(compgen -e | grep -E '^(LLMC|NCCL)_')
    for name in "${variables[@]}"; do mpirun+=(-x "$name"); done
}

start() {
    LLMC_JOB_TOKEN=$HOSTNAME.$$.$1
    # In a session of its own, so that Ctrl-C reaches mpirun by way of this script alone.
    run_and_wait setsid "${mpirun[@]}" "${trainer[@]}" -pi mpi
}

mpirun_command
check_settings
trainer_command
status=0
train_until_done start || status=$?
exit $status
