"""The file of facts: how it is written, and how two versions of it are compared."""

import json
from collections.abc import Iterator
from typing import Any


def differences(kept: Any, found: Any, place: str = "") -> Iterator[str]:
    """One line for each value that differs: its place, what it was, what it is."""
    if isinstance(kept, dict) and isinstance(found, dict):
        for key in [*kept, *(key for key in found if key not in kept)]:
            inner = f"{place} / {key}" if place else str(key)
            if key not in found:
                yield f"{inner}: was {kept[key]}, is gone"
            elif key not in kept:
                yield f"{inner}: new, {found[key]}"
            else:
                yield from differences(kept[key], found[key], inner)
    elif kept != found:
        yield f"{place}: was {kept}, is {found}"


def readable(value: Any, depth: int = 0) -> str:
    """JSON with whatever is short on one line.

    Args:
        value: Of plain types.
        depth: How far it is indented.
    """
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(flat) + depth <= 120:
        return flat
    pad, end = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {readable(inner, depth + 1)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{end}}}"
    return "[\n" + ",\n".join(pad + readable(inner, depth + 1) for inner in value) + f"\n{end}]"
