# Sourced by scripts that build on a machine with a GPU: sets `variables`, what make is to be told.
# Given are the names of variables that hold folders to write to: those are checked first.
#   CARRY   folder made by dev/gpu_carry.sh, where packages cannot be installed
#   COMMIT  what the programs say they were built from, where the tree came without git's history
# shellcheck shell=bash disable=SC2034

for name in "$@"; do
    there=${!name}
    while [ ! -e "$there" ]; do there=$(dirname -- "$there"); done
    if [ ! -d "$there" ] || [ ! -w "$there" ]; then
        echo "error: $name=${!name}: must be a folder to write to, and $there is none" >&2
        return 1
    fi
done
variables=()
[ -z "${COMMIT:-}" ] || variables+=("COMMIT=$COMMIT")
if [ -n "${CARRY:-}" ]; then
    if [ ! -d "$CARRY" ]; then
        echo "error: CARRY=$CARRY: no such folder; dev/gpu_carry.sh makes it" >&2
        return 1
    fi
    # Earlier versions of gpu_carry.sh left no mark.
    if [ ! -f "$CARRY/made_by_gpu_carry" ] && [ "$(ls -A -- "$CARRY")" != $'include\nlib' ]; then
        echo "error: CARRY=$CARRY: must be a folder that dev/gpu_carry.sh has made" >&2
        return 1
    fi
    carry=$(realpath "$CARRY")
    variables+=("GTEST_PATH=$carry" "OPENBLAS_PATH=$carry" "CUDNN_FRONTEND_PATH=$carry")
fi

# cuDNN may be there as a Python package alone, which has no libcudnn.so to link with.
use_cudnn_of_python() {
    local found links=$PWD/build/cudnn-of-python library
    found=$(python3 -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])' 2>/dev/null) || return
    rm -rf "$links"
    mkdir -p "$links/lib"
    ln -s "$found/include" "$links/include"
    for library in "$found"/lib/*.so.*; do
        ln -s "$library" "$links/lib/"
    done
    ln -s libcudnn.so.9 "$links/lib/libcudnn.so"
    variables+=("CUDNN_PATH=$links")
}
make check-deps "${variables[@]}" | grep '✓ cuDNN (' >/dev/null || use_cudnn_of_python
# Debian's and Ubuntu's OpenBLAS takes recent processors for very old ones.
if [ -z "${OPENBLAS_CORETYPE:-}" ] && grep -q avx512f /proc/cpuinfo; then
    export OPENBLAS_CORETYPE=SKYLAKEX
fi
