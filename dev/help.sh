# Sourced by a script before it does anything: with --help as its first word, prints what stands at
# the top of it, and ends it.
# shellcheck shell=bash
case ${1:-} in
    -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
esac
