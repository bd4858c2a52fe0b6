# shellcheck shell=bash
# What the scripts here share; they source it after their own settings. Settings that are the same
# in all of them, each of which can be given from the environment as well:
: "${BINARY:=./train_gpt2cu}"     # the trainer
: "${ZERO_STAGE:=1}"              # 1: each GPU keeps its share of the optimizer's state
: "${RECOMPUTE:=1}"               # as the trainer's -r; larger saves memory
: "${WEIGHT_DECAY:=0.1}"          # of matrices and embeddings
: "${FINAL_LR_FRACTION:=0.0}"     # learning rate at the end, as a fraction of LEARNING_RATE
: "${REDUCTION_WIDTH:=8}"         # same bits on every number of GPUs that divides it
: "${VAL_EVERY:=250}"             # validation every so many steps; 0: never
: "${VAL_BATCHES:=20}"            # micro-batches of a validation
: "${HELLASWAG:=1}"               # 1: HellaSwag with each validation (dev/data/hellaswag.py)
: "${SAMPLE_EVERY:=5000}"         # print a sample every so many steps; 0: never
: "${CHECKPOINT_EVERY:=1000}"     # steps
: "${CHECKPOINTS_KEPT:=2}"        # newest ones to keep; 0: all
: "${EXTRA_FLAGS:=}"              # more of the trainer's flags, separated by spaces
: "${GPUS:=}"                     # one-machine scripts: GPUs to use; empty: all that are here
: "${MAX_FAILURES:=3}"            # give up when so many tries in a row made no new checkpoint
: "${RETRY_WAIT_S:=10}"           # seconds before the next try
: "${PRICE_PER_GPU_HOUR:=}"       # your assumption, to be shown what the run costs; empty: none

fail() {
    echo "error: $*" >&2
    exit 1
}

say() { echo "== $*"; }

# ---- the command line: --help and nothing else

# What stands at the top of the script, and each setting with its value.
show_help() {
    local script=$0
    [[ $script == /* ]] || script=$OLDPWD/$script
    awk 'NR > 1 && /^([^#]|#SBATCH|# shellcheck)/ { exit } NR > 1 { print substr($0, 3) }' "$script"
    printf '\nSettings:\n'
    sed -n 's/^: "\${\([A-Z_]*\):=\(.*\)}" *# \(.*\)/\1=\2  # \3/p' "$script" scripts/lib.sh |
        awk -F= '!seen[$1]++'
}

if [ $# -gt 0 ]; then
    for word in "$@"; do
        [[ $word =~ ^(-h|--help)$ ]] ||
            fail "$word: unknown; settings come from the environment, and --help lists them"
    done
    show_help
    exit 0
fi

# The trainer's flags, each with the setting that it takes.
flag_settings=(-e MODEL -i TRAIN_DATA -j VAL_DATA -o OUTPUT -n CHECKPOINT_EVERY -nk CHECKPOINTS_KEPT
    -b BATCH -t SEQ_LEN -d TOTAL_BATCH -x STEPS -l LEARNING_RATE -u WARMUP -q FINAL_LR_FRACTION
    -c WEIGHT_DECAY -z ZERO_STAGE -r RECOMPUTE -rw REDUCTION_WIDTH -v VAL_EVERY -m VAL_BATCHES
    -h HELLASWAG -s SAMPLE_EVERY)

# The trainer with all flags that do not say how its processes find each other.
trainer_command() {
    local extra i name
    trainer=("$BINARY" -y 1)
    for ((i = 0; i < ${#flag_settings[@]}; i += 2)); do
        name=${flag_settings[i + 1]}
        trainer+=("${flag_settings[i]}" "${!name}")
    done
    read -ra extra <<<"$EXTRA_FLAGS"
    trainer+=("${extra[@]}")
}

# setting_of FLAG: " (-l is LEARNING_RATE)"; nothing for a flag without a setting.
setting_of() {
    local i
    for ((i = 0; i < ${#flag_settings[@]}; i += 2)); do
        if [ "${flag_settings[i]}" = "$1" ]; then echo " ($1 is ${flag_settings[i + 1]})"; fi
    done
}

# ---- the end: folders that nothing was written into go, and so does `meeting` (-pi fs)

made=()
meeting=
at_exit() {
    [ -z "$meeting" ] || rm -rf -- "$meeting"
    [ ${#made[@]} = 0 ] || rmdir -- "${made[@]}" 2>/dev/null || true
}
trap at_exit EXIT

# make_folder NAME: the folder that this setting names, an error unless one can write in it.
make_folder() {
    local path=${!1} missing=()
    while [ ! -e "$path" ] && [ ! -L "$path" ]; do
        missing+=("$path")
        path=$(dirname -- "$path")
    done
    made+=("${missing[@]}")
    mkdir -p -- "${!1}" 2>/dev/null || fail "$1=${!1}: no folder can be made there"
    if [ ! -w "${!1}" ] || [ ! -x "${!1}" ]; then
        fail "$1=${!1}: no permission to write in this folder"
    fi
}

# ---- signals: a run that is asked to stop saves a checkpoint and ends

stopped_by=
signals=0
child=

# The trainer takes SIGUSR1 as a wish to stop, and srun and mpirun hand it on to all its processes;
# SIGTERM and SIGINT they would answer by killing them.
on_signal() {
    stopped_by=$1
    signals=$((signals + 1))
    if [ -n "$child" ]; then kill -USR1 "$child" 2>/dev/null || true; fi
}
for signal in TERM INT HUP USR1; do
    # shellcheck disable=SC2064  # the name is meant as it is now
    trap "on_signal $signal" "$signal"
done

# run_and_wait COMMAND ...: its status. A signal interrupts bash's wait, so it may take several.
run_and_wait() {
    local status=0 again seen=$signals
    "$@" </dev/null &
    child=$!
    # One may have come just before the number was known.
    if [ "$seen" != "$signals" ]; then kill -USR1 "$child" 2>/dev/null || true; fi
    wait "$child" || status=$?
    while [ "$seen" != "$signals" ]; do
        seen=$signals
        again=0
        wait "$child" 2>/dev/null || again=$?
        # 127: it had ended before the signal came.
        if [ $again != 127 ]; then status=$again; fi
    done
    child=
    return "$status"
}

# ---- the loop

# Step of the newest complete checkpoint, 0 when there is none.
newest_checkpoint() {
    local path newest=0
    for path in "$OUTPUT"/DONE_*; do
        if [[ $path =~ /DONE_([0-9]{8})$ ]]; then newest=$((10#${BASH_REMATCH[1]})); fi
    done
    echo "$newest"
}

# check_number NAME LEAST MOST: an error unless this setting is a whole number within these bounds.
check_number() {
    if [ "$2 $3" = "0 1" ]; then
        [[ ${!1} =~ ^[01]$ ]] || fail "$1=${!1}: must be 0 or 1"
        return
    fi
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,9})$ ]] || [ "${!1}" -lt "$2" ] || [ "${!1}" -gt "$3" ]; then
        fail "$1=${!1}: must be a whole number from $2 to $3"
    fi
}

# Why the loop cannot begin, as an error.
check_settings() {
    local name
    for name in STEPS CHECKPOINT_EVERY MAX_FAILURES; do
        check_number $name 1 99999999  # a checkpoint's name has 8 digits
    done
    for name in BATCH SEQ_LEN TOTAL_BATCH; do check_number $name 1 2147483647; done
    check_number RETRY_WAIT_S 0 86400
    command -v "$BINARY" >/dev/null ||
        fail "BINARY=$BINARY: no such program in $PWD; build it, for example make train_gpt2cu"
    [ -n "$OUTPUT" ] || fail "OUTPUT is empty: must be a folder for logs and checkpoints"
    make_folder OUTPUT
}

# What no try could mend, found out before a run's first step by one --dry-run of the whole start:
# the same launcher, machines and number of processes, since only they tell whether TOTAL_BATCH can
# be divided, memory is enough and a GPU is there. An error line that names a flag or a file is the
# settings' fault and ends the script; after any other failure, such as a machine that did not
# answer, the loop may try.
dry_run() {
    local start=$1 status=0 errors line
    say "dry run"
    errors=$(mktemp) || fail "no temporary file can be made in ${TMPDIR:-/tmp}"
    trainer+=(--dry-run)
    "$start" 0 >/dev/null 2>"$errors" || status=$?
    unset 'trainer[-1]'
    line=$(sed -nE '/^train_gpt2: (-|[^ :]*[./][^ :]*: )/{s/^train_gpt2: //p;q}' "$errors")
    if [ $status != 0 ] && [ -z "$line" ] && [ -z "$stopped_by" ]; then
        cat "$errors" >&2
        say "the dry run ended with status $status"
    fi
    rm -f -- "$errors"
    if [ $status = 0 ] || [ -z "$line" ] || [ -n "$stopped_by" ]; then return; fi
    fail "$line$(setting_of "${line%%[ :]*}")"
}

# train_until_done START: calls START with the number of the try until the checkpoint of the last
# step is there. START starts the trainer, which resumes from the newest checkpoint, and returns its
# status. Returns 0 when done, 2 when a signal has stopped the run; ends the script with 1 after
# MAX_FAILURES tries in a row that made no new checkpoint. Where EXTRA_FLAGS asks for something else
# than training, it starts once and ends the script with the trainer's status.
train_until_done() {
    local start=$1 try=0 failures=0 status before after
    if [[ " $EXTRA_FLAGS " =~ \ (--dry-run|--help|--version)\  ]]; then
        status=0
        "$start" 0 || status=$?
        exit $status
    fi
    after=$(newest_checkpoint)
    # A run that has begun is not given up for a file that is away for a moment.
    if [ "$after" = 0 ]; then dry_run "$start"; fi
    if [ -n "$stopped_by" ]; then
        say "stopped by $stopped_by, checkpoint of step $after of $STEPS"
        return 2
    fi
    while [ "$after" -lt "$STEPS" ]; do
        before=$after
        try=$((try + 1))
        say "try $try, from step $before of $STEPS"
        status=0
        "$start" "$try" || status=$?
        after=$(newest_checkpoint)
        # Status 0 before the last step: somebody has sent the trainer itself a signal.
        if [ -n "$stopped_by" ] || { [ $status = 0 ] && [ "$after" -lt "$STEPS" ]; }; then
            say "stopped by ${stopped_by:-a signal}, checkpoint of step $after of $STEPS"
            if [ "$after" -ge "$STEPS" ]; then return 0; fi
            return 2
        fi
        if [ "$after" -ge "$STEPS" ]; then break; fi
        failures=$((after > before ? 0 : failures + 1))
        if [ $failures -ge "$MAX_FAILURES" ]; then
            fail "status $status, and no new checkpoint after $failures tries; giving up"
        fi
        say "try $try ended with status $status at the checkpoint of step $after;" \
            "next try in $RETRY_WAIT_S s"
        run_and_wait sleep "$RETRY_WAIT_S" || true
        if [ -n "$stopped_by" ]; then return 2; fi
    done
    say "done: checkpoint of step $after in $OUTPUT"
}

# ---- one machine

# Number of GPUs that CUDA would show here.
gpus_here() {
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

# say_cost TOKENS_PER_SECOND WHENCE: what the run takes at the speed of one GPU.
say_cost() {
    awk -v steps="$STEPS" -v d="$TOTAL_BATCH" -v rate="$1" -v whence="$2" \
        -v price="$PRICE_PER_GPU_HOUR" 'BEGIN {
            hours = steps * d / rate / 3600
            printf "== %.1f billion tokens: %.1f hours x GPUs", steps * d / 1e9, hours
            printf " at %d tokens/s (%s)", rate, whence
            if (price != "") printf "; %.0f at an assumed %s an hour", hours * price, price
            print ""
        }'
}

start_here() {
    if [ "$GPUS" = 1 ]; then
        run_and_wait "${trainer[@]}"
    else
        # In a session of its own, so that Ctrl-C reaches mpirun by way of on_signal alone.
        run_and_wait setsid mpirun -np "$GPUS" --bind-to none "${trainer[@]}" -pi mpi
    fi
}

# train_here TOKENS_PER_SECOND WHENCE: a whole run on GPUS of this machine's GPUs (default: all),
# with its cost computed from that speed.
train_here() {
    local status=0
    if [ -z "$GPUS" ]; then
        GPUS=$(gpus_here)
        [ "$GPUS" != 0 ] || fail "no GPU found here; set GPUS"
    fi
    check_number GPUS 1 256
    [[ $PRICE_PER_GPU_HOUR =~ ^([0-9]+([.][0-9]+)?)?$ ]] ||
        fail "PRICE_PER_GPU_HOUR=$PRICE_PER_GPU_HOUR: must be a number, such as 2.50, or empty"
    [ "$GPUS" = 1 ] || command -v mpirun >/dev/null ||
        fail "$GPUS GPUs need mpirun (apt-get install openmpi-bin), or set GPUS=1"
    check_settings
    trainer_command
    say_cost "$@"
    train_until_done start_here || status=$?
    exit $status
}
