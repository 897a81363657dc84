"""Parses a layout that a user names on the command line."""

from megatron_rl.config import ConfigError
from megatron_rl.planner.workload import RECOMPUTE, Candidate, Workload
from megatron_rl.topology import Layout

_SIZES = {
    "TP": "tp",
    "PP": "pp",
    "VPP": "vpp",
    "CP": "cp",
    "EP": "ep",
    "ETP": "etp",
    "FIRST": "first_stage_layers",
    "LAST": "last_stage_layers",
}
_OTHERS = ("GPUS", "MICROBATCH", "RECOMPUTE")


def named_candidate(text: str, work: Workload, world_size: int) -> Candidate:
    """Parses a layout such as "TP=8,PP=4,RECOMPUTE=full".

    Args:
        text: NAME=VALUE, separated by commas. Sizes that are not named are 1; the default of MICROBATCH is the longest sequence.
        work: The training step.
        world_size: Number of trainer ranks where the text does not name GPUS.

    Returns:
        The named layout and its microbatches.

    Raises:
        ConfigError: The text names no layout, or has an unknown name or a value out of range.
        LayoutError: The sizes do not divide the ranks.
    """
    values: dict[str, str] = {}
    if not text.strip():
        raise ConfigError("--explain names no layout; give sizes such as TP=8,PP=4, or 'config' for the file's layout")
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = word.partition("=")
        name = name.strip().upper()
        if not equals:
            raise ConfigError(f"--explain {text}: {word} has no value; write NAME=VALUE, such as TP=8")
        if name in values:
            raise ConfigError(f"--explain {text}: {name} is given twice")
        if name not in _SIZES and name not in _OTHERS:
            raise ConfigError(f"--explain {text}: {name} is not known; known are {', '.join((*_SIZES, *_OTHERS))}")
        values[name] = value.strip()
    recompute = values.pop("RECOMPUTE", "none").lower()
    if recompute not in RECOMPUTE:
        raise ConfigError(f"--explain {text}: RECOMPUTE={recompute} is not known; known are {', '.join(RECOMPUTE)}")
    for name, value in values.items():
        if not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise ConfigError(f"--explain {text}: {name}={value} is not a positive integer")
    numbers = {name: int(value) for name, value in values.items()}
    tokens = numbers.pop("MICROBATCH", work.longest_sequence)
    if tokens < work.longest_sequence:
        raise ConfigError(
            f"--explain {text}: MICROBATCH={tokens} is less than the longest sequence of {work.longest_sequence} tokens; "
            "sequences are never split"
        )
    world_size = numbers.pop("GPUS", world_size)
    layout = Layout(world_size, **{_SIZES[name]: size for name, size in numbers.items()})
    return Candidate(layout, tokens, recompute)
