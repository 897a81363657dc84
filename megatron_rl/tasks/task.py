"""A task: the source of its items, the templates of prompts and answers, and the reward."""

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.tasks.errors import RewardError, TaskError

Reward = Callable[..., float]
"""f(prompt, completion, item) -> reward; `item` is the source's own entry (a line of the JSONL file, a reasoning-gym entry). A
parameter named token_ids gets the ids of the completion."""

Environment = Callable[..., str | None]
"""f(turns, item) -> text that the policy reads next, or None to end the episode. turns: {role: user | assistant | tool, content}
in order. A parameter named token_ids gets the ids of the policy's last turn."""

_OPENING, _CLOSING = "<answer>", "</answer>"


@dataclass(frozen=True)
class Item:
    """One entry of a source."""

    fields: Mapping[str, Any]
    """Values that templates may name, among them `prompt` and `answer`."""
    solution: str | None
    """Reference solution, if the source has one."""
    entry: dict
    """The entry as the source has it, for a user's reward function."""


class Source(Protocol):
    """Items by index; the same index gives the same item in every process and after every restart."""

    def item(self, index: int) -> Item:
        """The item of this index."""
        ...

    def score(self, answer: str, item: Item) -> float:
        """The reward of an answer, extracted from a completion."""
        ...


def extract_answer(completion: str) -> str:
    """The answer in a completion: the content of its last <answer>...</answer>, else the full text; without outer white space."""
    answer, end = completion, 0
    # Not by an expression: <answer> thousands of times without an end takes it minutes, and here each character is read twice.
    while (start := completion.find(_OPENING, end)) >= 0 and (close := completion.find(_CLOSING, start + len(_OPENING))) >= 0:
        answer, end = completion[start + len(_OPENING) : close], close + len(_CLOSING)
    return answer.strip()


@dataclass(frozen=True)
class Task:
    """A task, made by `load_task`. Every index from 0 is valid: after the end sources start again (a file in another order)."""

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
        """The reference solution: the item's, else its answer in the answer template.

        Args:
            index: Index of the item.

        Returns:
            The text of the completion.

        Raises:
            TaskError: The item has neither solution nor answer.
        """
        item = self.item(index)
        if item.solution is not None:
            return item.solution
        if item.fields.get("answer") is None:
            raise TaskError(
                f"{self.name}: prompt {index} has no answer to learn from; set supervised.steps = 0 or add solutions to task.file"
            )
        return fill(self.answer_template, item.fields, "task.answer_template")

    def score(self, index: int, completion: str, token_ids: Sequence[int] = ()) -> float:
        """The reward of a completion. May be slow, and may be called from any thread.

        Args:
            index: Index of the item.
            completion: The completion's text.
            token_ids: The completion's ids, all of them.

        Returns:
            A finite number.

        Raises:
            RewardError: The reward function raised, or returned no finite number.
        """
        item = self.item(index)
        try:
            if self.reward is None:
                value = self.source.score(extract_answer(completion), item)
            else:
                value = self.reward(self.prompt(index), completion, item.entry, **_ids_if_asked(self.reward, token_ids))
            value = value.item() if hasattr(value, "item") else value  # numpy or torch scalars
            is_number = isinstance(value, int | float) and math.isfinite(value)
        except Exception as error:  # whatever a user's function raises costs one group, not the run
            raise RewardError(f"{self.name}: the reward of prompt {index} raised: {_last_lines(error)}") from error
        if not is_number:
            raise RewardError(f"{self.name}: the reward of prompt {index} is {value!r}; a reward must be a finite number")
        return float(value)

    def reply(self, index: int, turns: Sequence[Mapping[str, str]], token_ids: Sequence[int] = ()) -> str | None:
        """The environment's answer to the policy's last turn.

        Args:
            index: Index of the item.
            turns: The turns so far, in order, each with role and content.
            token_ids: The ids of the policy's last turn.

        Returns:
            Text that the policy reads next; None ends the episode.

        Raises:
            RewardError: The environment raised, or returned something else.
        """
        assert self.environment is not None
        try:
            asked = _ids_if_asked(self.environment, token_ids)
            text = self.environment([dict(turn) for turn in turns], self.item(index).entry, **asked)
        except Exception as error:  # as above
            raise RewardError(f"{self.name}: the environment of prompt {index} raised: {_last_lines(error)}") from error
        if text is not None and not isinstance(text, str):
            raise RewardError(
                f"{self.name}: the environment of prompt {index} returned {text!r}; it must return a string, or None to end "
                "the episode"
            )
        return text


def _ids_if_asked(function: Callable, token_ids: Sequence[int]) -> dict[str, list[int]]:
    """The argument token_ids, for a function that has a parameter of this name."""
    try:
        is_asked = "token_ids" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # what is not written in Python may have no signature
        return {}
    return {"token_ids": list(token_ids)} if is_asked else {}


def _last_lines(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-3:]).strip()


def fill(template: str, fields: Mapping[str, Any], where: str) -> str:
    """Replaces the {names} of a template.

    Args:
        template: A format string.
        fields: Values by name.
        where: Key of the configuration, for messages.

    Returns:
        The text.

    Raises:
        TaskError: The template is malformed or names an unknown field.
    """
    try:
        return template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise TaskError(
            f"{where} = {template!r} cannot be rendered ({type(error).__name__}: {error}); the names of this task are "
            f"{', '.join(sorted(fields))}; write literal braces twice, {{{{ and }}}}"
        ) from error
