"""A task: where its items come from, how they are put to the model, and how an answer is scored."""

import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.tasks.errors import RewardError, TaskError

Reward = Callable[[str, str, dict], float]
"""f(prompt, completion, item) -> reward; `item` is the source's own entry (a line of the JSONL file, a reasoning-gym entry)."""

Environment = Callable[[list[dict[str, str]], dict], str | None]
"""f(turns, item) -> what the policy reads next, or None at the end; turns: {role: user | assistant | tool, content}, in order."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Item:
    """One entry of a source. `fields`: what templates may name, `prompt` and `answer` among them."""

    fields: Mapping[str, Any]
    solution: str | None
    entry: dict


class Source(Protocol):
    """Items by index; the same index gives the same item in every process and after every restart."""

    def item(self, index: int) -> Item:
        """The item of this index."""
        ...

    def score(self, answer: str, item: Item) -> float:
        """The reward of an answer, extracted from a completion."""
        ...


def extract_answer(completion: str) -> str:
    """What of a completion counts: what its last <answer>...</answer> holds, else all of it; without outer white space."""
    tagged = _ANSWER_TAG.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


@dataclass(frozen=True)
class Task:
    """Made by `load_task`. Any index from 0 is valid; sources start again (a file in another order) at their end."""

    name: str
    source: Source
    prompt_template: str
    answer_template: str
    reward: Reward | None = None
    """None: the source's own score of the extracted answer."""
    environment: Environment | None = None

    def item(self, index: int) -> Item:
        """The source's item of this index."""
        return self.source.item(index)

    def prompt(self, index: int) -> str:
        """The text of the prompt, before any chat template."""
        return fill(self.prompt_template, self.item(index).fields, "task.prompt_template")

    def solution(self, index: int) -> str:
        """A worked solution: the item's own, else its answer in the answer template."""
        item = self.item(index)
        if item.solution is not None:
            return item.solution
        if item.fields.get("answer") is None:
            raise TaskError(
                f"{self.name}: prompt {index} has no answer to learn from; supervised.steps = 0, or solutions in task.file"
            )
        return fill(self.answer_template, item.fields, "task.answer_template")

    def score(self, index: int, completion: str) -> float:
        """The reward of a completion's text. Raises RewardError; may be slow, and may be called from any thread."""
        item = self.item(index)
        try:
            if self.reward is None:
                value = self.source.score(extract_answer(completion), item)
            else:
                value = self.reward(self.prompt(index), completion, item.entry)
            value = value.item() if hasattr(value, "item") else value  # of a numpy or torch scalar
            is_number = isinstance(value, int | float) and math.isfinite(value)
        except Exception as error:  # whatever a user's function raises costs one group, not the run
            raise RewardError(f"{self.name}: the reward of prompt {index} raised: {_last_lines(error)}") from error
        if not is_number:
            raise RewardError(f"{self.name}: the reward of prompt {index} is {value!r}; a reward is a finite number")
        return float(value)

    def reply(self, index: int, turns: Sequence[Mapping[str, str]]) -> str | None:
        """What the environment says to the policy's last turn; None ends the episode. Raises RewardError."""
        assert self.environment is not None
        try:
            text = self.environment([dict(turn) for turn in turns], self.item(index).entry)
        except Exception as error:  # as above
            raise RewardError(f"{self.name}: the environment of prompt {index} raised: {_last_lines(error)}") from error
        if text is not None and not isinstance(text, str):
            raise RewardError(
                f"{self.name}: the environment of prompt {index} answered {text!r}; an answer is a string, or None at the end"
            )
        return text


def _last_lines(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-3:]).strip()


def fill(template: str, fields: Mapping[str, Any], where: str) -> str:
    """The template with its {names} replaced. Raises TaskError for a name that the item does not have."""
    try:
        return template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise TaskError(
            f"{where} = {template!r}: cannot be filled ({type(error).__name__}: {error}); the names of this task are "
            f"{', '.join(sorted(fields))}; braces that are meant as such are written twice, {{{{ and }}}}"
        ) from error
