"""TOML files and `--section.key value` overrides to a checked Config, and back to TOML."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.renamed import present_name, use_present_names
from megatron_rl.config.sections import Section, Slurm
from megatron_rl.config.tree import Config

T = TypeVar("T", bound=BaseModel)


class Profile(Section):
    """What a site's file may contain."""

    slurm: Slurm = Slurm()


def load_config(path: Path, overrides: Sequence[str] = (), profile: Path | None = None) -> Config:
    """Reads and checks a TOML file.

    Args:
        path: The file.
        overrides: Words of the command line, `--section.key value` or `--section.key=value`, with values in TOML's notation (a
            bare word is a string; `none` removes the key).
        profile: A site's file with a [slurm] section alone; values of `path` and of the overrides take precedence.

    Raises:
        ConfigError: The message lists every problem.
    """
    return check_tree(read_tree(path, overrides, profile), path)


def read_tree(path: Path, overrides: Sequence[str] = (), profile: Path | None = None) -> dict[str, Any]:
    """What `load_config` reads, before it is checked; the arguments are the same."""
    tree = _read_toml(path)
    if profile is not None:
        tree = _merged(_read_profile(profile), tree)
    for dotted, value in parse_overrides(overrides):
        _set(tree, dotted, value)
    return tree


def check_tree(tree: dict[str, Any], path: Path) -> Config:
    """Checks a tree of sections.

    Args:
        tree: Values by section and key.
        path: The file that the tree was read from, for the message.

    Raises:
        ConfigError: The message lists every problem.
    """
    if key := _key_with_nul(tree):
        raise ConfigError(f"{path}: {key} has a NUL character, which no file name, argument or environment variable may have")
    return _validated(Config, tree, path)


def _key_with_nul(tree: dict[str, Any]) -> str | None:
    for key, value in tree.items():
        if isinstance(value, dict) and (found := _key_with_nul(value)):
            return f"{key}.{found}"
        if "\0" in str(key) or (isinstance(value, str | list) and "\0" in "".join(map(str, value))):
            return repr(key) if "\0" in str(key) else str(key)
    return None


def parse_overrides(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Parses words of the command line that override values.

    Args:
        words: Such as ['--run.steps', '5', '--task.name=chain_sum'].

    Returns:
        Keys and values, such as [('run.steps', 5), ('task.name', 'chain_sum')]; None removes a key.

    Raises:
        ConfigError: A word is no override, or a key has no value.
    """
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word.split("=")[0]:
            raise ConfigError(f"unexpected argument '{word}': write overrides as --section.key value, for example --run.steps 5")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} has no value: write overrides as --section.key value")
            text = rest.pop(0)
        pairs.append((present_name(name.replace("-", "_")), _value(text)))
    return pairs


def to_toml(config: Config) -> str:
    """The resolved configuration; reading it again gives an equal Config."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a TOML file, for example one of model_configs/"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    use_present_names(tree, str(path))
    return tree


def _read_profile(path: Path) -> dict[str, Any]:
    tree = _read_toml(path)
    _validated(Profile, tree, path)
    return tree


def _validated(kind: type[T], tree: dict[str, Any], path: Path) -> T:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n" + "\n".join(f"  {_explain(problem)}" for problem in error.errors())) from error


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, section by section; where both have a value, the one of `above`."""
    both = {
        name: _merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return {**below, **both}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text.lower() == "none" else text


def _set(tree: dict, dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for name in sections:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--{dotted}: {name} is a value, not a section")
    if value is None:
        tree.pop(key, None)
    else:
        tree[key] = value


def _without_none(tree: Any) -> Any:
    return {k: _without_none(v) for k, v in tree.items() if v is not None} if isinstance(tree, dict) else tree


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(problem["loc"][-1]), _fields_at(problem["loc"][:-1]), n=1)
        return f"{where}: unknown key" + (
            f"; did you mean {near[0]}?" if near else f"; this section has: {', '.join(_fields_at(problem['loc'][:-1]))}"
        )
    if problem["type"] == "missing":
        return f"{where}: is missing, and has no default"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where} = {problem['input']!r}: {message}" if where else message


def _fields_at(location: Sequence[str | int]) -> list[str]:
    """Names of the keys that the section at this place of the tree knows."""
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        candidates = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
        if not candidates:
            return []
        model = candidates[0]
    return list(model.model_fields)
