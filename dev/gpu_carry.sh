#!/usr/bin/env bash
# Collects what dev/gpu_check.sh needs on a machine that cannot install packages: GoogleTest,
# OpenBLAS and the headers of the cuDNN front-end.
#   dev/gpu_carry.sh [FOLDER]        default .carry; then there: CARRY=.carry dev/gpu_check.sh
# The libraries are static and need nothing newer than this machine's glibc. Installs nothing here
# but what `make setup` does.
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
folder=${1:-.carry}
if [ $# -gt 1 ] || [[ $folder == -* ]]; then
    echo "error: $*: must be one folder; --help shows what there is" >&2
    exit 1
fi
# Its include and lib are removed first, so it must be what an earlier run has made, or nothing.
mark=$folder/made_by_gpu_carry
if [ -e "$folder" ] && [ ! -f "$mark" ]; then
    if [ ! -d "$folder" ] || [ -n "$(ls -A "$folder")" ]; then
        echo "error: $folder: holds something else; must be a new folder, or an earlier run's" >&2
        exit 1
    fi
fi

# Prints the folder of a header, or of a library, that the compiler finds.
header_folder() {
    echo "#include <$1>" | g++ -E -x c++ - | sed -n "s|^# 1 \"\(.*\)/$1\".*|\1|p" | head -n 1
}
library() {
    local path
    path=$(g++ -print-file-name="$1")
    [ "$path" != "$1" ] || { echo "error: $1 not found; make setup installs it" >&2; exit 1; }
    echo "$path"
}

rm -rf "$folder/include" "$folder/lib"
mkdir -p "$folder/include" "$folder/lib"
touch "$mark"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp -r "$(header_folder gtest/gtest.h)/gtest" "$folder/include/"
cp "$(library libgtest.a)" "$(library libgtest_main.a)" "$folder/lib/"

# Of OpenBLAS only what llmc/cpu calls: then it needs no Fortran library.
cp "$(header_folder cblas.h)"/{cblas.h,openblas_config.h} "$folder/include/"
ld -r -o "$work/openblas.o" -u cblas_sgemm -u cblas_dgemm -u openblas_set_num_threads \
    -u openblas_get_config -u openblas_get_corename "$(library libopenblas.a)"
strip -g "$work/openblas.o"
ar rcs "$folder/lib/libopenblas.a" "$work/openblas.o"

python=.venv/bin/python
[ -x $python ] || python=python3
$python -m pip download -q --disable-pip-version-check --no-deps -d "$work" \
    -r dev/requirements-cuda.txt
$python -m zipfile -e "$work"/nvidia_cudnn_frontend-*.whl "$work/frontend"
cp -r "$work/frontend/include/." "$folder/include/"

du -sh "$folder"
