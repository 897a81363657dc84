"""The chat template of a model folder, rendered as transformers renders it, without transformers."""

import json
from pathlib import Path
from typing import Any

from megatron_rl.tasks.errors import TaskError


class ChatTemplate:
    """The template in chat_template.jinja, else in tokenizer_config.json. Raises TaskError if the folder has none."""

    def __init__(self, folder: Path) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template comes with a downloaded model

        settings_file = folder / "tokenizer_config.json"
        try:
            settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.exists() else {}
        except ValueError as error:
            raise TaskError(f"{settings_file}: not valid JSON ({error})") from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._template = environment.from_string(_source(folder, settings))
        self._special_tokens = _special_tokens(settings)

    def open_answer(self, prompt: str) -> str:
        """The prompt as the user's message, followed by the opening of the model's answer."""
        messages = [{"role": "user", "content": prompt}]
        return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)


def _source(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        raise TaskError(f"{folder} has no chat template, but task.chat_template = true; set it to false or use another model")
    return source


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ...: templates write them by name. Older files give each as a table."""
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    return {key: v["content"] if isinstance(v, dict) else v for key, v in named.items() if isinstance(v, str | dict)}


def _refuse(message: str) -> None:
    raise TaskError(f"the model's chat template rejects the prompt: {message}")
