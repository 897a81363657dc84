#!/usr/bin/env bash
# Sets everything up, then runs the gates of scripts/lint.sh and the tests.
#
#   bash scripts/test.sh                                   # all that this machine can run; docs/developing says how long a part takes
#   bash scripts/test.sh tests/unit -k keep_set            # what pytest is given; without the gates
#   bash scripts/test.sh -m slow                           # the tests that take minutes each, which the first command leaves out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
venv=${VENV:-.venv}
# One thread per process: the distributed tests start several processes, and threads that wait for each other's core cost more
# than they bring.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0
tests() { "$venv/bin/python" -m pytest --durations=25 --durations-min=1 "$@" || status=$?; }
# Two processes of tests: unit tests start few processes that would compete, and the end-to-end tests wait half of their time for
# one process that imports. More than two whole runs at once need more than 24 GiB.
side_by_side() { tests --numprocesses 2 "$@"; }

if (($# > 0)); then
    tests "$@"
else
    bash scripts/lint.sh || status=$?
    side_by_side --dist worksteal tests/architecture tests/unit tests/contracts
    side_by_side --dist loadfile --no-loadscope-reorder tests/e2e
    tests tests/distributed tests/gpu
fi
exit "$status"
