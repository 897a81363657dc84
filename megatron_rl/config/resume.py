"""What a resumed run is asked to do otherwise than before."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.folder import RunFolder
from megatron_rl.config.reader import read_tree
from megatron_rl.config.tree import Config

FIXED = ("model.path", "model.architecture")
"""What a run is: its weights, servers and tokenizer were made from these."""


def changes_on_resume(folder: RunFolder, config: Config) -> list[str]:
    """'section.key: old -> new' of every value that differs from the run's own. Raises ConfigError for what no run can change."""
    before, now = (dict(_flat(tree.model_dump(mode="json"))) for tree in (folder.config(), config))
    changed = {
        key: f"{key}: {before.get(key)} -> {now.get(key)}" for key in sorted(before | now) if before.get(key) != now.get(key)
    }
    fixed = [text for key, text in changed.items() if key.startswith(FIXED)]
    if fixed:
        raise ConfigError(
            f"{folder.path} was started with another model, which --resume cannot change: {'; '.join(fixed)}; "
            "leave these as they were, or start another run by --run.name OTHER"
        )
    return [*changed.values(), *_changes_of_text(folder, config)]


def _changes_of_text(folder: RunFolder, config: Config) -> list[str]:
    """What the policy and the rewards of a run that an earlier version started see otherwise from now on."""
    if "special_tokens" in read_tree(folder.config_file).get("task", {}):
        return []
    lines = []
    if config.task.special_tokens == "keep":
        lines.append(
            "rewards and environments get special tokens too, but for those that end a sequence or pad it; "
            "--task.special_tokens strip leaves them out as before"
        )
    if not config.task.former_text:
        lines.append(
            "truncation and padding that tokenizer.json was saved with no longer apply, eos_token_id of generation_config.json "
            "and of config.json ends completions, and solutions end as the chat template closes a turn; --task.former_text true "
            "keeps the ids as they were"
        )
    return lines


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
