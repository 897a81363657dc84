#!/usr/bin/env bash
# The demo: sets up the environment, then trains a tiny MoE by asynchronous RL. About 15 minutes on two cores.
#
#   bash scripts/demo.sh
#   bash scripts/demo.sh --resume                          # resume after Ctrl-C
#   bash scripts/demo.sh --section.key value               # any setting of the config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec "${VENV:-.venv}/bin/megatron-rl" train model_configs/tiny-moe-cpu.toml "$@"
