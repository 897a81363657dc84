"""A file that is replaced at once."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a staging file, sync, rename: `path` has these bytes or its former ones, never a part.

    Only the user may read it.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(staging, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    staging.replace(path)
