#!/usr/bin/env bash
# Writes scripts/locks/pyX.Y.txt, the packages that setup.sh installs. Run it after a change of dependencies in pyproject.toml or
# pins.in. Versions of the present lock are kept where they fit.
#
#   bash scripts/lock.sh 3.11
#   bash scripts/lock.sh 3.12 --upgrade          # newest versions instead
#   bash scripts/lock.sh gpu                     # scripts/locks/gpu-py3.12.txt, for setup.sh --gpu; needs no GPU
#   bash scripts/lock.sh gpu --verify            # writes nothing: is it a closure?
#   bash scripts/lock.sh gpu --verify --download FOLDER   # and does each file of it say what the lock says? 4.4 GB
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?usage: lock.sh 3.11|3.12|gpu [--upgrade]}
resolver=scripts/locks/resolve.py
if [[ $version == gpu ]]; then
    version=3.12
    resolver=scripts/locks/resolve_gpu.py
fi
python=$(bash scripts/find_python.sh "$version") || { echo "lock: error: no Python $version found on PATH or in pyenv; install it" >&2; exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
if [[ $resolver == *gpu* ]]; then "$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check install uv --requirement scripts/locks/gpu.in; fi
"$scratch/venv/bin/python" "$resolver" "${@:2}"
