"""What can be wrong with a model's description or with the tensors that are said to belong to it."""

import difflib
from collections.abc import Iterable


class UnknownFamilyError(ValueError):
    """No table describes this kind of model."""


class UnsupportedArchitectureError(ValueError):
    """The Hugging Face config asks for something that the family's table or Megatron cannot express."""


class TensorMismatchError(ValueError):
    """Tensors that are missing, left over, or of the wrong shape; the message lists all of them."""


def nearest(name: str, candidates: Iterable[str], count: int = 2) -> str:
    """A hint such as " (nearest expected: 'a.weight')", or "" when nothing resembles `name`."""
    found = difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.6)
    return f" (nearest expected: {', '.join(map(repr, found))})" if found else ""
