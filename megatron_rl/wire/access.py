"""The run's key: made at start, in no file and on no command line, carried by every request between the processes of a run."""

import os

KEY_HEADER = "x-megatron-rl-key"
"""Every request carries the run's key in this header."""

KEY_VARIABLE = "MEGATRON_RL_KEY"
"""The environment variable that gives the key to a process of the run; only the user's own processes can read it."""


class KeyMissingError(RuntimeError):
    """A process that talks to others of a run was started without the run's key."""

    def __init__(self):
        super().__init__(
            f"{KEY_VARIABLE} is not set: it holds the run's key, which every process of a run needs; the launcher sets it"
        )


def key_from_environment() -> str:
    """Raises KeyMissingError."""
    if not (key := os.environ.get(KEY_VARIABLE)):
        raise KeyMissingError
    return key


def with_key(key: str) -> dict[str, str]:
    """The header of a request."""
    return {KEY_HEADER: key}
