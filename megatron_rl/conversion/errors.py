"""Errors of checkpoint folders, and the report of names that do not match."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from megatron_rl.errors import UserError
from megatron_rl.weight_mapping.errors import nearest

_MAX_HINTS = 20
"""A hint compares one name with all others, which takes a second for a model with tens of thousands of tensors."""


class CheckpointError(UserError, ValueError):
    """A folder is not a complete, readable checkpoint of the model that its config describes, or cannot be written as one."""


class NameReport:
    """Collects what is wrong with the tensors of a checkpoint; names that differ only in numbers are reported together."""

    def __init__(self, expected: Iterable[str], found: Iterable[str]) -> None:
        self._expected, self._found = set(expected), set(found)
        self.missing = sorted(self._expected - self._found)
        self.unexpected = sorted(self._found - self._expected)
        self.wrong: list[str] = []
        self._hints = 0

    def text(self) -> str:
        """One line for each kind of problem; "" when there is none."""
        lines = [self._line("missing", names, self.unexpected) for names in _alike(self.missing)]
        lines += [self._line("not part of the model", names, self._expected) for names in _alike(self.unexpected)]
        return "\n  ".join(lines + self.wrong)

    def _line(self, problem: str, names: Sequence[str], candidates: Iterable[str]) -> str:
        self._hints += 1
        hint = nearest(names[0], candidates) if self._hints <= _MAX_HINTS else ""
        listed = ", ".join(names) if len(names) <= 3 else f"{len(names)} tensors from {names[0]} to {names[-1]}"
        return f"{problem}: {listed}{hint}"


def _alike(names: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"\d+", "#", name)].append(name)
    return list(groups.values())
