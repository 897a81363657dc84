"""The errors of tasks."""

from megatron_rl.errors import RunError, UserError


class TaskError(UserError, ValueError):
    """A task that cannot be used; the message names the value, the rule and the remedy."""


class RewardError(RunError, RuntimeError):
    """A reward function that raised or returned no finite number; the message names the function and what happened."""
