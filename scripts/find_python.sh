#!/usr/bin/env bash
# Prints the interpreter of a Python version: from PATH, or from pyenv's folder. Fails silently when there is none.
#
#   bash scripts/find_python.sh 3.12
set -euo pipefail
version=${1:?usage: find_python.sh X.Y}

# A pyenv shim may exist for a version that is not active, so the name is not enough: it must run.
runs() { [[ $("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$version" ]]; }

pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "${HOME:-/nonexistent}/.pyenv")}
for candidate in "$(command -v "python$version" || true)" "$pyenv_root"/versions/"$version".*/bin/python "$(command -v python3 || true)"; do
    if [[ -n $candidate ]] && runs "$candidate"; then
        printf '%s\n' "$candidate"
        exit 0
    fi
done
exit 1
