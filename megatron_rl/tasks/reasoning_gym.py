"""Items that reasoning-gym generates with a random generator that is seeded for each index."""

import difflib
import hashlib
import importlib
import threading
import warnings
from typing import Any

from megatron_rl.tasks.errors import TaskError
from megatron_rl.tasks.task import Item


class ReasoningGymSource:
    """One reasoning-gym dataset of `size` items. Templates may name the entry's `metadata`, for example {expression}."""

    def __init__(self, name: str, arguments: dict[str, Any], size: int, seed: int) -> None:
        self.name, self.size = name, size
        self._dataset = _create(name, {**arguments, "size": size, "seed": _spread(seed)})
        self._lock = threading.Lock()  # some datasets keep a generator or a cache between items

    def item(self, index: int) -> Item:
        """The item of this index."""
        with self._lock:
            entry = self._dataset[index % self.size]
        metadata = {key: value for key, value in entry.get("metadata", {}).items() if isinstance(key, str)}
        fields = metadata | {"prompt": entry["question"], "answer": entry["answer"]}
        return Item(fields=fields, solution=None, entry=entry)

    def score(self, answer: str, item: Item) -> float:
        """reasoning-gym's own score, in most tasks 1 for right and little or 0 for wrong."""
        return self._dataset.score_answer(answer, item.entry)


def _spread(seed: int) -> int:
    """reasoning-gym adds the index to the seed: without this, seed + 1 would give the same items, shifted by one.

    Below 2^31, since some of its generators take 32 bits.
    """
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big") // 2


def _create(name: str, arguments: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from one of its dependencies, when Python compiles it
        gym = importlib.import_module("reasoning_gym")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
        raise TaskError(
            f"task.name = '{name}': reasoning-gym has no such task; similar names are {', '.join(near)} (of {len(known)} tasks)"
        )
    try:
        return gym.create_dataset(name, **arguments)
    except (TypeError, AssertionError, ValueError) as error:
        fields = ", ".join(f for f in known[name][1].__dataclass_fields__ if f not in ("seed", "size"))
        raise TaskError(f"task.arguments of '{name}' are invalid: {error}; it takes {fields}") from error
