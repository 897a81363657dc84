#!/usr/bin/env bash
# Writes scripts/locks/pyX.Y.txt, the packages that setup.sh installs. Run it after a change of dependencies in pyproject.toml or
# pins.in. Versions of the present lock are kept where they fit.
#
#   bash scripts/lock.sh 3.11
#   bash scripts/lock.sh 3.12 --upgrade          # newest versions instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?usage: lock.sh 3.11|3.12 [--upgrade]}
python=$(bash scripts/find_python.sh "$version") || { echo "lock: error: no Python $version found on PATH or in pyenv; install it" >&2; exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" scripts/locks/resolve.py "${@:2}"
