#!/usr/bin/env bash
# Installation, unit tests and the README's first command under several versions of Python, each in an environment of its own
# (6 GB) under build/matrix. Ends with a table, and fails if a part failed.
#
#   tests/matrix.sh python3.11 python3.12 python3.13
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=0
lines=()
for python in "$@"; do
    version=$("$python" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))') || {
        failed=1
        lines+=("$(printf '%-8s not there' "$python")")
        continue
    }
    environment=build/matrix/$version
    for part in setup unit pretrain; do
        began=$SECONDS
        echo "== Python $version: make $part"
        if make "PYTHON=$python" "VENV=$environment" "$part"; then
            result=passed
        else
            result=FAILED
            failed=1
        fi
        lines+=("$(printf '%-8s %-9s %-6s %5d s' "$version" "$part" "$result" $((SECONDS - began)))")
    done
done

echo "== result"
printf '%s\n' "${lines[@]}"
exit "$failed"
