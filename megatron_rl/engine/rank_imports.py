"""What the ranks of a RankPool import, loaded once in the process from which they are forked (multiprocessing's forkserver).

Importing this module hides the GPUs from the entire process: only ranks, and the process that forks them, may do it. Nothing here
may start a thread, since a fork does not take it along.
"""


def import_for_ranks() -> None:
    """The order matters: torch must see no GPU, and Megatron-Core must see the stand-in for CUDA."""
    from megatron_rl.engine.groups import choose_device

    choose_device("cpu")
    import megatron.core  # noqa: F401
    import transformers  # noqa: F401

    import megatron_rl.engine.engine  # noqa: F401


import_for_ranks()
