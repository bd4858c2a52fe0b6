#!/usr/bin/env bash
# All that can only be checked on a machine with a GPU, and a summary at the end.
#   dev/gpu_check.sh [PART ...]      parts: build test many shared sanitize; without any, all
#
# build     trainer and GPU tests in FP32, BF16 and BF16 with FP32 gradients, bench_comm
# test      the GPU tests
# many      several GPUs against one (test/test_many_gpus.py)
# shared    the same with 2, 4 and 8 ranks on the GPUs at hand, one GPU is enough; some minutes
# sanitize  compute-sanitizer's memcheck and racecheck over two steps of a small model, with our own
#           kernels in FP32 and BF16, and over the tests of those kernels whose threads meet in
#           shared memory at sizes that the small model does not have; memcheck with cuDNN, too
#
#   LOGS    folder for what the parts print (default build/gpu_check)
#   CARRY, COMMIT   see dev/gpu_variables.sh
set -uo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.." || exit
export PATH=$PATH:/usr/local/cuda/bin  # compute-sanitizer
LOGS=${LOGS:-build/gpu_check}
parts=("$@")
[ $# -gt 0 ] || parts=(build test many shared sanitize)
for part in "${parts[@]}"; do
    case $part in
        build | test | many | shared | sanitize) ;;
        *)
            echo "error: $part: must be build, test, many, shared or sanitize" >&2
            exit 1
            ;;
    esac
done
summary=()
failed=0

. dev/gpu_variables.sh LOGS || exit 1
mkdir -p -- "$LOGS" || exit 1

# The folder of a build, given its make variables.
folder() {
    make -n -B REPORT=0 "${variables[@]}" "$@" gpu_tests 2>/dev/null |
        sed -n 's|.* -o \(build/[^ ]*\)/gpu_tests .*|\1|p' | tail -n 1
}

# step NAME COMMAND ...: runs a command into its log; its time, and how it ended, for the summary.
step() {
    local name=$1 start=$SECONDS status=0 line
    shift
    echo "== $name: $*"
    "$@" >"$LOGS/${name// /-}.log" 2>&1 || status=$?
    line=$(printf '%-34s %4d s  ' "$name" $((SECONDS - start)))
    if [ $status = 0 ]; then
        summary+=("$line ok")
    else
        summary+=("$line FAILED ($status), $LOGS/${name// /-}.log")
        failed=1
        tail -n 40 "$LOGS/${name// /-}.log"
    fi
    return "$status"
}

build() { make -j"$(nproc)" REPORT=0 "${variables[@]}" "$@"; }

build_rest() {
    local status=0 job jobs=()
    build PRECISION=FP32 "$fp32/train_gpt2cu" "$fp32/gpu_tests" &
    jobs+=($!)
    build PRECISION=BF16 USE_CUDNN=0 "$own/train_gpt2cu" &
    jobs+=($!)
    build PRECISION=BF16 SWITCHES=1 "$bf16-switches/train_gpt2cu" &
    jobs+=($!)
    build PRECISION=BF16 "$bf16/bench_comm" &
    jobs+=($!)
    build PRECISION=BF16 GRAD_PRECISION=FP32 "$wide/gpu_tests" &
    jobs+=($!)
    for job in "${jobs[@]}"; do wait "$job" || status=1; done
    return "$status"
}

# Two steps of a small model under a tool of compute-sanitizer.
sanitize() {
    compute-sanitizer --tool "$1" "${@:3}" "$2" -i "$LOGS/tokens.bin" -e custom:L2C64H2T64 -b 2 \
        -t 64 -x 2 -v 0 -s 0
}

memcheck() { sanitize memcheck "$1" --error-exitcode 9; }

# racecheck does not follow the asynchronous barriers of cuBLAS's kernels for sm_90 (nvjet_...) and
# reports hazards in them; leaving those kernels out (--kernel-name-exclude) made it fail by
# itself. So all is checked, and a hazard counts where it names a kernel that is not the library's.
racecheck() {
    local text
    text=$(sanitize racecheck "$1") || return
    printf '%s\n' "$text"
    grep -q 'RACECHECK SUMMARY' <<<"$text" || return 9
    if grep -q 'Internal Sanitizer Error' <<<"$text"; then return 9; fi
    if grep 'access at' <<<"$text" | grep -vE 'access at [^ ]*(nvjet|cublas|cutlass)'; then
        return 9
    fi
}

# Kernels of our own alone: racecheck does not follow the barriers of attention's and of cuDNN's
# kernels for sm_90, and of the classifier's tests one takes minutes.
kernels() {
    compute-sanitizer --tool "$1" --error-exitcode 9 "$2" \
        --gtest_filter='GpuEncoder*:GpuGlobalNorm*:GpuLayernorm*:GpuTree*:GpuGelu*:-*Bandwidth*'
}

fp32=$(folder PRECISION=FP32 USE_CUDNN=)
bf16=$(folder PRECISION=BF16)
own=$(folder PRECISION=BF16 USE_CUDNN=0)
wide=$(folder PRECISION=BF16 GRAD_PRECISION=FP32)
nvidia-smi -L
make check-deps "${variables[@]}"
for part in "${parts[@]}"; do
    case $part in
        build)
            # First what the others share: the object with the cuDNN front-end.
            step "build bf16" build PRECISION=BF16 train_gpt2cu gpu_tests &&
                step "build fp32 own wide" build_rest
            ;;
        test)
            for place in "$fp32" "$bf16" "$wide"; do
                name=$(basename "$place")
                step "test $name" python3 dev/run_tests.py --skips test/skips.txt --out "$LOGS" \
                    --unit "$name=$place/gpu_tests"
                summary+=("    $(tail -n 1 "$LOGS/test-$name.log")")
            done
            ;;
        many)
            step "many GPUs" python3 dev/run_tests.py --skips test/skips.txt --out "$LOGS" \
                --unit many_gpus=test/test_many_gpus.py
            summary+=("    $(tail -n 1 "$LOGS/many-GPUs.log")")
            ;;
        shared)
            step "shared GPUs" python3 test/test_many_gpus.py --shared
            summary+=("    $(tail -n 1 "$LOGS/shared-GPUs.log")")
            ;;
        sanitize)
            python3 dev/bench/random_tokens.py "$LOGS/tokens.bin" 100000
            for place in "$fp32" "$own"; do
                step "memcheck $(basename "$place")" memcheck "$place/train_gpt2cu"
                step "racecheck $(basename "$place")" racecheck "$place/train_gpt2cu"
            done
            for place in "$fp32" "$bf16"; do
                for tool in memcheck racecheck; do
                    step "$tool kernels $(basename "$place")" kernels $tool "$place/gpu_tests"
                done
            done
            [ "$bf16" = "$own" ] ||
                step "memcheck $(basename "$bf16")" memcheck "$bf16/train_gpt2cu"
            ;;
    esac
done
echo
printf '%s\n' "${summary[@]}"
exit $failed
