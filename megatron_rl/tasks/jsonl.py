"""Items from a JSONL file, in a new random order in each epoch."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_rl.tasks.errors import TaskError
from megatron_rl.tasks.task import Item


class JsonlSource:
    """A JSONL file. Each line is an object with strings `prompt`, `answer` (or what the reward needs) and optionally `solution`.

    The order of epoch r is a permutation seeded with (seed, r), so that an item is a function of (file, seed, index).
    """

    def __init__(self, file: Path, seed: int, needs_answer: bool) -> None:
        self.file = file
        self._items = [_item(file, number, line, needs_answer) for number, line in _lines(file)]
        if not self._items:
            raise TaskError(f"task.file = {file}: has no lines; give at least one prompt")
        self._order = lru_cache(maxsize=4)(lambda round_: np.random.default_rng((seed, round_)).permutation(len(self._items)))

    def item(self, index: int) -> Item:
        """The item of this index; after its end the file continues from the start in another order."""
        round_, position = divmod(index, len(self._items))
        return self._items[self._order(round_)[position]]

    def score(self, answer: str, item: Item) -> float:
        """1 if the answer equals the line's answer, except for white space at the ends; else 0."""
        return float(answer == item.fields["answer"].strip())


def _lines(file: Path) -> list[tuple[int, str]]:
    """(line number from 1, text) of the lines that are not blank."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task.file = {file}: cannot be read as UTF-8 text ({error}); give the path of a JSONL file") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _item(file: Path, number: int, line: str, needs_answer: bool) -> Item:
    where = f"{file}, line {number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter: thousands of brackets within brackets
        raise TaskError(f"{where}: not valid JSON ({error}); found {line[:80]!r}; each line is one JSON object") from error
    if not isinstance(entry, dict):
        raise TaskError(f"{where}: found {line[:80]!r}; each line is one JSON object with 'prompt' and 'answer'")
    for key, is_needed in (("prompt", True), ("answer", needs_answer), ("solution", False)):
        if (is_needed or key in entry) and not isinstance(entry.get(key), str):
            remedy = " (not needed with your own reward function, task.reward)" if key == "answer" else ""
            raise TaskError(f"{where}: '{key}' is {entry.get(key)!r}; it must be a string{remedy}")
        if isinstance(entry.get(key), str) and not _is_text(entry[key]):
            raise TaskError(
                f"{where}: '{key}' has an unpaired surrogate, such as \\ud83d alone, which is no character; remove it"
            )
    return Item(fields=entry, solution=entry.get("solution"), entry=entry)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
