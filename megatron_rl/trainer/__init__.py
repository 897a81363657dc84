"""The training loop of one rank: `python -m megatron_rl.trainer RUN_DIR [--resume]`, with torch's rank variables in the environment."""
