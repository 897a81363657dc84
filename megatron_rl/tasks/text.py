"""Converts text to token ids and back with the files of a model folder; used for rollouts and for supervised steps."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_rl.config.sections import Task as TaskSection
from megatron_rl.errors import lfs_pointer
from megatron_rl.tasks.chat_template import ChatTemplate, read_settings, special_tokens
from megatron_rl.tasks.errors import TaskError


class TextEncoder:
    """The tokenizer of a model folder and, if the task uses it, its chat template. Raises TaskError if one is missing.

    Prompts, solutions, replies and completions are encoded and decoded as transformers does it by default. In particular
    tokenizer.json may have been saved with truncation or padding on, which transformers resets on every call, and so does this.
    """

    def __init__(self, folder: Path, section: TaskSection) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            wrong = f"{path}: cannot be read as a tokenizer ({error}); use a model folder that has one"
            raise TaskError(lfs_pointer(path) or wrong) from error
        if not section.former_text:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self._folder, self._former = folder, section.former_text
        self._keeps_special_tokens = section.special_tokens == "keep"
        self._chat_template = (
            ChatTemplate(folder, section.system_prompt, section.template_arguments) if section.chat_template else None
        )
        self.eos_ids = _eos_ids(folder, all_files=not section.former_text)
        """Tokens that end a completion."""

    @cached_property
    def num_tokens(self) -> int:
        """Largest id plus 1."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def end_of_turn_id(self) -> int:
        """The token that ends a reference solution: the one by which the chat template closes an answer, else the first eos.

        Raises:
            TaskError: The template fails.
        """
        if self._chat_template is None or self._former:
            return self.eos_ids[0]
        after = self.continuation(self._chat_template.end_of_turn())
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        # The first eos or special token: some templates put white space before it.
        return next((i for i in after if i in special or i in self.eos_ids), self.eos_ids[0])

    def prompt(self, text: str) -> tuple[int, ...]:
        """A prompt as the policy reads it: in the chat template, or with the special tokens that the tokenizer adds."""
        if self._chat_template:  # it has the special tokens itself
            return self.continuation(self.prompt_text(text))
        return self._encode(text, add_special_tokens=True)

    def prompt_text(self, text: str) -> str:
        """What `prompt` encodes: the text, in the chat template if the task uses it."""
        return self._chat_template.open_answer(text) if self._chat_template else text

    def solution(self, text: str) -> tuple[int, ...]:
        """A reference solution with the token that ends it."""
        return (*self.continuation(text), self.end_of_turn_id)

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
        """The text of some ids, as rewards and environments read it.

        Special tokens are kept, since a policy may write <think> or <answer> as such, but for those that end a sequence or pad
        it; with task.special_tokens = "strip" none is kept.
        """
        if self._keeps_special_tokens:
            return self.whole_text([i for i in map(int, ids) if i not in self._silent_ids])
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def whole_text(self, ids: Sequence[int]) -> str:
        """The text of some ids with all special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def _silent_ids(self) -> frozenset[int]:
        """Ids that end a sequence, end a turn, or pad."""
        settings = read_settings(self._folder / "tokenizer_config.json")
        padding = special_tokens(self._folder, settings).get("pad_token")
        pad_ids = {_whole_number(read_settings(self._folder / name).get("pad_token_id")) for name in _ID_FILES}
        pad_ids.add(self._tokenizer.token_to_id(padding) if padding is not None else None)
        return frozenset({*self.eos_ids, self.end_of_turn_id, *(i for i in pad_ids if i is not None)})

    @cached_property
    def newline_ids(self) -> tuple[int, ...]:
        """Ids of all tokens that have a newline; in a byte-pair vocabulary there are many."""
        return self.ids_with("\n")

    def ids_with(self, text: str) -> tuple[int, ...]:
        """Ids of all tokens that have this text within theirs."""
        return tuple(i for i, own in enumerate(self._token_texts) if text in own)

    def stop_ids(self, tokens: Iterable[str | int]) -> tuple[int, ...]:
        """Ids of `rollouts.stop_tokens`.

        Raises:
            TaskError: A token that the tokenizer does not have.
        """
        ids = [self._tokenizer.token_to_id(token) if isinstance(token, str) else token for token in tokens]
        for token, token_id in zip(tokens, ids, strict=True):
            if token_id is None or not 0 <= token_id < self.num_tokens:
                raise TaskError(
                    f"rollouts.stop_tokens has {token!r}, which is no token of {self._folder}; give the text of one token, or an "
                    f"id from 0 to {self.num_tokens - 1}, and longer texts by rollouts.stop"
                )
        return tuple(i for i in ids if i is not None)

    def ids_that_may_complete(self, stop: str) -> tuple[int, ...]:
        """Ids of all tokens with which a text can come to contain the stop string.

        Those whose text has its last character, and those that are parts of a character.
        """
        return tuple(i for i, own in enumerate(self._token_texts) if stop[-1] in own or "\ufffd" in own)

    @cached_property
    def _token_texts(self) -> list[str]:
        """The text of each id, as it follows other text: some decoders leave out the white space before the first token."""
        first = next(iter(self.continuation("a")), 0)
        before = len(self.whole_text([first]))
        texts = self._tokenizer.decode_batch([[first, i] for i in range(self.num_tokens)], skip_special_tokens=False)
        return [text[before:] for text in texts]


_ID_FILES = ("generation_config.json", "config.json")


def _eos_ids(folder: Path, all_files: bool) -> tuple[int, ...]:
    """The eos_token_id of generation_config.json and of config.json, each once; else of the first that has one."""
    found: list[int] = []
    for name in _ID_FILES:
        settings = read_settings(folder / name)
        nested = settings.get("text_config")
        eos = settings.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if any(_whole_number(i) is None for i in ids):
                raise TaskError(f"{folder / name}: eos_token_id is {eos!r}; it must be an id, or a list of ids")
            found += ids
            if not all_files and found:
                break
    if not found:
        raise TaskError(
            f"{folder}: neither generation_config.json nor config.json has eos_token_id, without which no completion ends; add "
            "it to one of them"
        )
    return tuple(dict.fromkeys(found))


def _whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
