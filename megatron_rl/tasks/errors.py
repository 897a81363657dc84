"""The typed errors of tasks."""


class TaskError(ValueError):
    """A task that cannot be used: names the value, the rule and the remedy."""


class RewardError(RuntimeError):
    """A reward that raised, or that is no finite number: names the function and what happened."""
