"""The run's key: made when the run starts, sent with every request between its processes, in no file and on no command line."""

import os

from megatron_rl.errors import UserError

KEY_HEADER = "x-megatron-rl-key"
"""Every request carries the run's key in this header."""

KEY_VARIABLE = "MEGATRON_RL_KEY"
"""The environment variable that gives the key to a process of the run; only the user's own processes can read it."""


class KeyMissingError(UserError):
    """A process that talks to others of a run was started without the run's key."""

    def __init__(self) -> None:
        super().__init__(
            f"{KEY_VARIABLE} is not set. It holds the run's key, which every process of a run needs. The launcher sets "
            "it: start the run by `megatron-rl train` or `megatron-rl launch`"
        )


def key_from_environment() -> str:
    """The key that the launcher gave this process.

    Raises:
        KeyMissingError: There is none.
    """
    if not (key := os.environ.get(KEY_VARIABLE)):
        raise KeyMissingError
    return key


def with_key(key: str) -> dict[str, str]:
    """The header that every request carries."""
    return {KEY_HEADER: key}
