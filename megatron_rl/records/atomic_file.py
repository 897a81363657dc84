"""A file that is replaced at once."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """The bytes under `path`, or what was there before: never a part. Private to the user."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(aside, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)
