"""Keys of the TOML file that were renamed: the former name is still read, with one line that names the present one."""

import sys
from typing import Any

from megatron_rl.config.errors import ConfigError

RENAMED_KEYS = {
    "slurm.max_lives_without_checkpoint": "slurm.max_attempts_without_checkpoint",
}
"""Former name -> present name, with their sections."""

_announced: set[str] = set()


def present_name(dotted: str) -> str:
    """The present name of a key, as in "slurm.partition". A former name is announced once in each process."""
    name = RENAMED_KEYS.get(dotted, dotted)
    if name != dotted and dotted not in _announced:
        _announced.add(dotted)
        print(f"megatron-rl: the key {dotted} is now called {name}; the former name is still read", file=sys.stderr)
    return name


def use_present_names(tree: dict[str, Any], source: str) -> None:
    """Renames the former keys in a tree of sections, in place.

    Args:
        tree: What was read from a TOML file.
        source: The file, for the message.

    Raises:
        ConfigError: A key is given under both names.
    """
    for former in RENAMED_KEYS:
        holder = _section(tree, former)
        key = former.rpartition(".")[2]
        if holder is None or key not in holder:
            continue
        section, _, present = present_name(former).rpartition(".")
        target: dict[str, Any] = tree
        for part in section.split("."):
            target = target.setdefault(part, {})
        if present in target:
            raise ConfigError(
                f"{source}: {former} is the former name of {section}.{present}, and both are given; remove {former}"
            )
        target[present] = holder.pop(key)


def _section(tree: dict[str, Any], dotted: str) -> dict[str, Any] | None:
    """The table that would hold the key; None where there is no such table."""
    found: Any = tree
    for part in dotted.split(".")[:-1]:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
