#!/usr/bin/env bash
# Sets everything up, then runs the gates of scripts/lint.sh and the tests.
#
#   bash scripts/test.sh                                   # all that this machine can run
#   bash scripts/test.sh tests/unit -k keep_set            # what pytest is told
#   bash scripts/test.sh -m slow                           # the tests that take minutes each, which the first command leaves out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
venv=${VENV:-.venv}
# One thread per process: the distributed tests start several processes, and threads that wait for each other's core cost more
# than they bring.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0
bash scripts/lint.sh || status=$?
"$venv/bin/python" -m pytest "$@" || status=$?
exit "$status"
