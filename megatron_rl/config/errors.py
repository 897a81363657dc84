"""The error of a configuration."""

from megatron_rl.errors import UserError


class ConfigError(UserError, ValueError):
    """A configuration or a command that cannot run.

    The message has all problems at once, each with the value, the rule and, where possible, the remedy.
    """
