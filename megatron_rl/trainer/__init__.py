"""The training loop of one rank: `python -m megatron_rl.trainer RUN_DIR [--resume]`.

torch's rank variables (RANK, LOCAL_RANK, WORLD_SIZE) are in the environment.
"""
