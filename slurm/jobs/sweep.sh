#!/bin/bash
# One job for each combination of values, then one report of all runs. Usage: sweep.sh CONFIG
set -euo pipefail

megatron-rl launch "$1" --profile slurm/profiles/modules.toml \
    --sweep 'optimizer.learning_rate=[1e-6, 3e-6]' --sweep 'rollouts.top_p=[0.95, 1.0]'
echo "when they have run: megatron-rl report runs/*/ --out sweep.html"
