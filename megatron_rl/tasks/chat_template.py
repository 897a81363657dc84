"""The chat templates of a model folder, rendered by transformers' own renderer, which loads no torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import lfs_pointer
from megatron_rl.tasks.errors import TaskError

FILE = "chat_template.jinja"
NAMED_FILES = "additional_chat_templates"
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that templates get by name (transformers, `special_tokens_map`)."""
_OWN_ARGUMENTS = (
    "messages", "conversations", "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "tokenize",
    "return_dict", "return_tensors", "padding", "truncation", "max_length", *_TOKEN_NAMES,
)  # fmt: skip
"""What the program gives, or what says how transformers returns a prompt and no template reads."""


class ChatTemplate:
    """The templates of a folder: files of their own if there are any, else those in tokenizer_config.json.

    Args:
        folder: The model folder.
        system_prompt: The first message of every conversation that `open_answer` opens; None: no such message.
        arguments: What else templates get, such as enable_thinking; as transformers' apply_chat_template takes them: tools,
            documents, and chat_template, the name of one of several templates.

    Raises:
        TaskError: The folder has no template, none of the name asked for, or an argument that the program gives itself.
    """

    def __init__(self, folder: Path, system_prompt: str | None = None, arguments: Mapping[str, Any] | None = None) -> None:
        # Not on top: it takes a second, and few light processes need it.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render_chats = render_jinja_template
        self._folder, self._system_prompt, self._arguments = folder, system_prompt, dict(arguments or {})
        if taken := sorted(set(self._arguments) & set(_OWN_ARGUMENTS)):
            raise TaskError(
                f"task.template_arguments has {', '.join(taken)}, which the program and the tokenizer decide; remove it"
            )
        settings = read_settings(folder / "tokenizer_config.json")
        self._name = self._arguments.pop("chat_template", None)
        self._templates = _templates(folder, settings)
        self._special_tokens = special_tokens(folder, settings)
        self._source(self._arguments.get("tools"))  # a missing name is an error now

    def open_answer(self, prompt: str) -> str:
        """The prompt as the user's message, followed by the opening of the model's answer.

        Raises:
            TaskError: The template fails.
        """
        return self.render([*self._opening(), {"role": "user", "content": prompt}], add_generation_prompt=True)

    def end_of_turn(self) -> str:
        """What follows the text of an answer: the rest of its message; where there is none, the next message of the user.

        Raises:
            TaskError: The template fails, or leaves the answer out.
        """
        question, answer = {"role": "user", "content": "1 + 1"}, "MARKED-ANSWER"
        turns: list[dict[str, str]] = [*self._opening(), question, {"role": "assistant", "content": answer}]
        return self._after(answer, turns) or self._after(answer, [*turns, question])

    def _after(self, answer: str, turns: Sequence[Mapping[str, Any]]) -> str:
        _, found, after = self.render(turns).partition(answer)
        if not found:
            raise TaskError(
                f"{self._folder}: its chat template does not render the text of an answer; set task.chat_template = false"
            )
        return after

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, tools: Sequence[dict] | None = None
    ) -> str:
        """A conversation as text.

        Args:
            messages: Each with `role` and what the template reads of it: content, tool_calls, ...
            add_generation_prompt: Whether the opening of the model's answer follows.
            tools: JSON schemas of the tools, in place of those of the arguments.

        Raises:
            TaskError: The template fails, whatever it is that it does.
        """
        arguments = self._arguments if tools is None else {**self._arguments, "tools": list(tools)}
        source = self._source(arguments.get("tools"))
        try:
            chats: Any = self._render_chats(  # its annotation names the first of the two lists that it returns
                conversations=[[dict(message) for message in messages]],
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **arguments},
            )
        except Exception as error:  # a template is a program that comes with the model, and may raise anything
            raise TaskError(
                f"{self._folder}: its chat template cannot be rendered ({type(error).__name__}: {error}); give what it asks for "
                "by task.system_prompt or task.template_arguments, or set task.chat_template = false"
            ) from error
        return chats[0][0]

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system_prompt}] if self._system_prompt is not None else []

    def _source(self, tools: Any) -> str:
        """The template that transformers' get_chat_template would take."""
        known = ", ".join(sorted(self._templates))
        if self._name is not None:
            if self._name not in self._templates:
                raise TaskError(f"task.template_arguments.chat_template = {self._name!r}: {self._folder} has {known}; name one")
            return self._templates[self._name]
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise TaskError(
                f"{self._folder} has the chat templates {known} and no default; name one by task.template_arguments.chat_template"
            )
        return self._templates["default"]


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder; empty where there is no file.

    Raises:
        TaskError: The file holds no JSON object.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (ValueError, RecursionError, OSError) as error:
        raise TaskError(lfs_pointer(file) or f"{file}: not valid JSON ({error}); download it again") from error
    if not isinstance(settings, dict):
        raise TaskError(f"{file}: must be a JSON object; download it again")
    return settings


def special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json, else of special_tokens_map.json. Older files have tables."""
    named = {**read_settings(folder / "special_tokens_map.json"), **{k: v for k, v in settings.items() if v is not None}}
    texts = {
        name: named[name]["content"] if isinstance(named[name], dict) else named[name] for name in _TOKEN_NAMES if name in named
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    files = {file.stem: file for file in sorted((folder / NAMED_FILES).glob("*.jinja"))}
    if (folder / FILE).exists():
        files["default"] = folder / FILE
    try:
        if files:
            return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{folder}: a chat template cannot be read ({error}); download it again") from error
    source = settings.get("chat_template")
    if not source:
        raise TaskError(f"{folder} has no chat template, but task.chat_template = true; set it to false or use another model")
    templates = source if isinstance(source, dict) else {"default": source}
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        templates = {entry.get("name"): entry.get("template") for entry in source}
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in templates.items()):
        raise TaskError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {str(source)[:80]!r}; it must be a template, or a list of "
            "{name, template}; download it again, or set task.chat_template = false"
        )
    return templates
