"""Errors that several files of the engine raise."""

from megatron_rl.errors import UserError


class UnsupportedModelError(UserError, ValueError):
    """This combination of model, layout and machine cannot be built."""
