"""`.metadata` of a torch_dist checkpoint is a pickle: it is read so that a foreign folder cannot run code."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.errors import UserError


class MetadataError(UserError, ValueError):
    """A `.metadata` that cannot be read, or that names more than a checkpoint needs."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only the types that a checkpoint's metadata consist of."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.partition(".")[0] in ("torch", "collections", "megatron") else None
        plain = isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
        known = module.startswith("torch.distributed.checkpoint.") and isinstance(found, type)
        if (
            plain
            or known
            or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"))
        ):
            return found
        raise MetadataError(f".metadata asks for {module}.{name}, which no checkpoint needs; it is not read")


def read_metadata(file: Path) -> Metadata:
    """Read the file as data.

    Raises:
        MetadataError: The file cannot be read, or names more than a checkpoint needs.
    """
    try:
        with file.open("rb") as stream:
            return _MetadataUnpickler(stream).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise MetadataError(f"{file} cannot be read: {error}") from error
