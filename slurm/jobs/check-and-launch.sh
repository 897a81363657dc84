#!/bin/bash
# Check model and layout on this machine's CPU, print the plan, then submit. Usage: check-and-launch.sh CONFIG [--section.key value ...]
set -euo pipefail
config=$1
shift
profile=${MEGATRON_RL_PROFILE:-slurm/profiles/modules.toml}

megatron-rl check "$config" --no-server "$@"
megatron-rl launch "$config" --profile "$profile" --dry-run "$@"
read -r -p "submit? [y/N] " answer
if [[ $answer == y ]]; then
    megatron-rl launch "$config" --profile "$profile" "$@"
fi
