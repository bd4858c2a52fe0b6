#!/usr/bin/env bash
# Installs what is missing, and nothing else.
#   dev/setup.sh [PACKAGE ...] [--optional=PACKAGE ...] [--python=REQUIREMENTS]
# PACKAGEs are libraries that the Makefile did not find (`make setup` passes them); optional ones
# are left out where the distribution does not have them, and REQUIREMENTS, more Python packages for
# .venv, where pip cannot install them. Tools and .venv are checked here.
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."

fail() {
    echo "error: $*" >&2
    exit 1
}

can_make_venv() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 9))' 2>/dev/null
}

packages=()
optional=()
requirements=
for argument in "$@"; do
    case $argument in
        --optional=*) optional+=("${argument#*=}") ;;
        --python=*) requirements=${argument#*=} ;;
        -*) fail "$argument: unknown; --help shows what there is" ;;
        *) packages+=("$argument") ;;
    esac
done
if ! command -v make >/dev/null || ! command -v "${CXX:-g++}" >/dev/null; then
    # Without them the Makefile could not look for libraries: name those too, to ask only once.
    packages+=(g++ make libopenblas-dev libgtest-dev)
fi
command -v git >/dev/null || packages+=(git)
can_make_venv python3 || can_make_venv /usr/bin/python3 || packages+=(python3-venv)

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" </dev/null >"$log" 2>&1
}

known() { apt-cache show "$1" 2>/dev/null | grep -q .; }

# All that is missing, each once, on one line.
names() {
    printf '%s\n' "${packages[@]}" "${optional[@]}" | awk 'NF && !seen[$0]++' | paste -sd' '
}

update_lists() {
    echo "setup: apt-get update"
    apt-get update -qq -o DPkg::Lock::Timeout=300 </dev/null >"$log" 2>&1 ||
        fail "apt-get update failed: $(tail -n 1 "$log")"
}

install_packages() {
    if ! command -v apt-get >/dev/null; then
        fail "no apt-get here: install by hand what Debian calls $(names)"
    elif [ "$(id -u)" != 0 ]; then
        echo "error: packages are missing; install them with this line and start again:" >&2
        echo "sudo apt-get install $(names)" >&2
        exit 1
    fi
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    local updated=0 package wanted=("${packages[@]}")
    for package in "${packages[@]}" "${optional[@]}"; do
        if [ $updated = 0 ] && ! known "$package"; then
            update_lists
            updated=1
        fi
    done
    for package in "${optional[@]}"; do
        if known "$package"; then
            wanted+=("$package")
        else
            echo "setup: no package $package here, going on without"
        fi
    done
    if [ ${#wanted[@]} = 0 ]; then return; fi
    echo "setup: apt-get install ${wanted[*]}"
    if apt_install "${wanted[@]}"; then return; fi
    # Old lists name versions that the mirrors have replaced.
    if [ $updated = 0 ]; then
        update_lists
        if apt_install "${wanted[@]}"; then return; fi
    fi
    tail -n 20 "$log" >&2
    fail "apt-get install ${wanted[*]} failed, its last lines are above"
}

# The virtual environment is complete when it holds a copy of the requirements it was made from and
# its Python still starts.
venv_is_complete() {
    cmp -s dev/requirements.txt .venv/requirements.txt && .venv/bin/python -c '' 2>/dev/null
}

make_venv() {
    local python=python3
    can_make_venv python3 || python=/usr/bin/python3
    echo "setup: Python packages of dev/requirements.txt into .venv"
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear .venv || fail "$python -m venv .venv failed"
    fi
    # --no-compile: of all those modules few are ever imported, and Python compiles them then.
    .venv/bin/python -m pip install -q --no-compile --disable-pip-version-check \
        -r dev/requirements.txt ||
        fail "pip could not install dev/requirements.txt, its message is above"
    cp dev/requirements.txt .venv/requirements.txt
}

if [ ${#packages[@]} != 0 ] || [ ${#optional[@]} != 0 ]; then install_packages; fi
venv_is_complete || make_venv
if [ -n "$requirements" ]; then
    echo "setup: Python packages of $requirements into .venv"
    .venv/bin/python -m pip install -q --disable-pip-version-check -r "$requirements" ||
        echo "setup: pip could not install $requirements, going on without"
fi
