"""Errors of model configs and of tensors that do not fit them."""

import difflib
from collections.abc import Iterable

from megatron_rl.errors import UserError


class UnknownFamilyError(UserError, ValueError):
    """No family of this package has the config's model_type and architectures."""


class UnsupportedArchitectureError(UserError, ValueError):
    """The Hugging Face config asks for something that the family's rules or Megatron cannot express."""


class TensorMismatchError(UserError, ValueError):
    """A tensor is missing, unexpected, or of the wrong shape."""


def nearest(name: str, candidates: Iterable[str], count: int = 2) -> str:
    """A hint such as " (nearest expected: 'a.weight')", or "" when nothing resembles `name`."""
    found = difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.6)
    return f" (nearest expected: {', '.join(map(repr, found))})" if found else ""
