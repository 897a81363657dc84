#!/usr/bin/env bash
# Tells the owner of one node with 1 to 8 GPUs what of this program works there; at most fifteen minutes. docs/gpus.md has the steps.
#
#   bash scripts/gpu_smoke.sh                              # all steps; logs in gpu_smoke/
#   bash scripts/gpu_smoke.sh --only doctor keep-set       # some of them
#
# Status: 0 every step passed or was skipped for a named reason; 1 a step failed; 2 no GPU, and no other step failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VENV:-.venv}/bin/python
[[ -x $python ]] || { echo "gpu_smoke: error: there is no $python. Run \`bash scripts/setup.sh --gpu\` first." >&2; exit 1; }
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m scripts.smoke "$@"
