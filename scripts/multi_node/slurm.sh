# shellcheck shell=bash
# shellcheck disable=SC2154  # some variables are those of lib.sh
# What the Slurm jobs here share; sourced after scripts/lib.sh.
: "${EXIT_WAIT_S:=60}"  # seconds that processes have to end by themselves once one has ended

# "0,2,4-7" -> 6
count_of_list() {
    awk -F, '{
        for (i = 1; i <= NF; ++i) n += split($i, ends, "-") == 2 ? ends[2] - ends[1] + 1 : 1
        print n + 0
    }' <<<"$1"
}

# GPUs of each node of the job, which is the number of its processes there.
job_gpus_per_node() {
    if [ -n "${GPUS_PER_NODE:-}" ]; then
        echo "$GPUS_PER_NODE"
    elif [ -n "${SLURM_NTASKS_PER_NODE:-}" ]; then
        echo "$SLURM_NTASKS_PER_NODE"
    elif [ "${SLURM_GPUS_ON_NODE:-0}" != 0 ]; then
        echo "$SLURM_GPUS_ON_NODE"
    elif [[ ${SLURM_GPUS_PER_NODE:-} =~ (^|:)([1-9][0-9]*)$ ]]; then
        echo "${BASH_REMATCH[2]}"  # as asked for; all that salloc's shell knows
    elif [ -n "${SLURM_JOB_GPUS:-}" ]; then
        count_of_list "$SLURM_JOB_GPUS"
    else
        gpus_here  # the job's script runs on its first node
    fi
}

# The first address of a name that other machines can reach. Many systems give a machine's own name
# a loopback address.
outside_address() {
    local family
    for family in ahostsv4 ahosts; do
        { getent $family "$1" || true; } | awk '
            $2 == "STREAM" && $1 !~ /^127\./ && $1 !~ /^::1$/ && $1 !~ /^fe80:/ && !found {
                print $1
                found = 1
            }'
    done | sed -n 1p
}

# Address under which all nodes reach the first node, where rank 0 runs, and this script.
head_address() {
    local node address
    if [ -n "${HEAD_ADDRESS:-}" ]; then
        echo "$HEAD_ADDRESS"
        return
    fi
    node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    address=$(outside_address "$node")
    # Slurm's own address of the node: often its name, where it is not told otherwise.
    if [ -z "$address" ]; then
        address=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
        if [ "$address" = "$node" ]; then address=; fi
    fi
    if [ -z "$address" ] && [ "$SLURM_NNODES" = 1 ]; then address=127.0.0.1; fi
    [ -n "$address" ] ||
        fail "no address found of node $node; set HEAD_ADDRESS to one that all nodes reach"
    echo "$address"
}

# A port for rank 0, so that two jobs on one node do not get the same.
job_port() { echo "${PORT:-$((20000 + SLURM_JOB_ID % 10000))}"; }

# start_with_srun TRY FLAG ...: the trainer as one process a GPU, with more flags.
start_with_srun() {
    local try=$1
    shift
    # Rank 0 of this try talks to processes of this try alone.
    export LLMC_JOB_TOKEN=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$try
    # Each process must see all GPUs of its node, to take the one that its rank says; the rank is
    # known to the process alone.
    # shellcheck disable=SC2016
    run_and_wait env -u SLURM_GPUS_PER_TASK -u SLURM_TRES_PER_TASK -u SLURM_GPU_BIND \
        srun --nodes="$SLURM_NNODES" --ntasks-per-node="$GPUS_PER_NODE" \
        --ntasks=$((SLURM_NNODES * GPUS_PER_NODE)) --distribution=block --cpu-bind=none \
        --kill-on-bad-exit=0 --wait="$EXIT_WAIT_S" \
        bash -c 'exec "$@" -pn "$SLURM_NTASKS" -pr "$SLURM_PROCID"' bash \
        "${trainer[@]}" -pg "$GPUS_PER_NODE" "$@"
}

# check_job NAME ...: an error unless Slurm has set these beside SLURM_JOB_ID.
check_job() {
    local name
    for name in "$@"; do
        [ -n "${!name:-}" ] ||
            fail "SLURM_JOB_ID=$SLURM_JOB_ID is set, but not $name: must be both, as in a job of" \
                "Slurm, or neither"
    done
    check_number SLURM_NNODES 1 99999999
    check_number SLURM_JOB_ID 1 4294967295
}

# What must be known before the first try.
prepare_slurm_job() {
    local given=${GPUS_PER_NODE:-}
    [ -n "${SLURM_JOB_ID:-}" ] || fail "this is a Slurm job: sbatch $0"
    check_job SLURM_NNODES SLURM_JOB_NODELIST
    GPUS_PER_NODE=$(job_gpus_per_node)
    [ -n "$given" ] || [ "$GPUS_PER_NODE" != 0 ] ||
        fail "no GPUs found; ask Slurm for some (--gpus-per-node), or set GPUS_PER_NODE"
    check_number GPUS_PER_NODE 1 256
    check_number EXIT_WAIT_S 1 86400  # srun takes 0 for ever
    check_number REQUEUE 0 1
    [ -z "${PORT:-}" ] || check_number PORT 1 65535
    check_settings
    [ -z "${MEETING_FOLDER:-}" ] || make_folder MEETING_FOLDER
    trainer_command
    say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $GPUS_PER_NODE processes a node"
}

# run_slurm_job START: the loop over START, then back into the queue if time was too short.
run_slurm_job() {
    local status=0
    train_until_done "$1" || status=$?
    if [ $status = 2 ] && [ "$stopped_by" = USR1 ] && [ "$REQUEUE" = 1 ]; then
        say "back into the queue, to go on from there"
        scontrol requeue "$SLURM_JOB_ID" || fail "the job cannot be requeued: submit it again"
    fi
    exit $status
}
