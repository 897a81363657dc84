"""Converts text to token ids and back with the files of a model folder; used for rollouts and for supervised steps."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from megatron_rl.config.sections import Task as TaskSection
from megatron_rl.tasks.chat_template import ChatTemplate
from megatron_rl.tasks.errors import TaskError


class TextEncoder:
    """The tokenizer of a model folder and, if the task uses it, its chat template. Raises TaskError if one is missing."""

    def __init__(self, folder: Path, section: TaskSection) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TaskError(f"{path}: cannot be read as a tokenizer ({error}); use a model folder that has one") from error
        self._chat_template = ChatTemplate(folder) if section.chat_template else None
        self.eos_ids = _eos_ids(folder)
        """Tokens that end a completion; a reference solution ends with the first one."""

    @cached_property
    def num_tokens(self) -> int:
        """Largest id plus 1."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def prompt(self, text: str) -> tuple[int, ...]:
        """A prompt as the policy reads it: in the chat template, or with the special tokens that the tokenizer adds."""
        if self._chat_template:  # it has the special tokens itself
            return self.continuation(self._chat_template.open_answer(text))
        return self._encode(text, add_special_tokens=True)

    def solution(self, text: str) -> tuple[int, ...]:
        """A reference solution with the end-of-sequence token."""
        return (*self.continuation(text), self.eos_ids[0])

    def continuation(self, text: str) -> tuple[int, ...]:
        """Text that follows other text: no special tokens are added."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Raises TaskError for invalid text, such as an unpaired surrogate."""
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise TaskError(f"{text[:80]!r} cannot be encoded: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    @cached_property
    def newline_ids(self) -> tuple[int, ...]:
        """Ids of all tokens that have a newline; in a byte-pair vocabulary there are many."""
        texts = self._tokenizer.decode_batch([[i] for i in range(self.num_tokens)], skip_special_tokens=False)
        return tuple(i for i, text in enumerate(texts) if "\n" in text)


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """The eos_token_id of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        try:
            settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except ValueError as error:
            raise TaskError(f"{path}: not valid JSON ({error})") from error
        eos = settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id"))
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    raise TaskError(
        f"{folder}: neither generation_config.json nor config.json has eos_token_id, without which no completion ends; add it to "
        "one of them"
    )
