"""Writes the generated pages of docs/: configuration, command line, metrics and API, each from the code that it describes.

    .venv/bin/python scripts/docs.py             # writes them, in a few seconds
    .venv/bin/python scripts/docs.py --check     # writes nothing; shows what differs and exits with status 1

The API pages are read from the source by griffe, without an import. The other pages import the configuration, the metric
catalogue and the command line, which load neither torch nor Megatron nor vLLM.
"""

import argparse
import difflib
import inspect
import json
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from docs_api import ROOT, api_pages, page, prose, table
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))  # this checkout's package, wherever the environment has another one


# --- configuration


def configuration() -> str:
    """docs/configuration.md, from the section classes."""
    from megatron_rl.config.renamed import RENAMED_KEYS
    from megatron_rl.config.tree import Config

    sections = list(config_sections(Config, ""))
    body = ["Sections: " + " · ".join(f"[{name}](#{name.replace('.', '')})" for name, _ in sections)]
    for name, section in sections:
        body.append(f"## {name}")
        if "__doc__" in vars(section) and section.__doc__:
            body.append(prose(inspect.cleandoc(section.__doc__)))
        rows = [
            (f"`{key}`", type_of(field), default_of(field), prose(re.sub(r"\bNone:\s", "Not set: ", field.description or "")))
            for key, field in section.model_fields.items()
            if section_in(field) is None
        ]
        body.append(table(("key", "type", "default", "meaning"), rows))
    renamed = [(f"`{former}`", f"`{present}`") for former, present in RENAMED_KEYS.items()]
    body += ["## Former names", "Still read, with one line that names the present one.", table(("former", "present"), renamed)]
    return page("Configuration", "megatron_rl/config/sections.py", CONFIGURATION_INTRO, body)


CONFIGURATION_INTRO = """After this page you can write a run's TOML file and know what each value does.

One TOML file describes one run; `model_configs/` has complete examples. Every value can also be given on the command line, in
TOML's notation: `--rollouts.top_p 0.9 --run.name narrower`; `none` removes a key. An unknown key and a value out of range are
errors, and so are sections that contradict each other. Faults of one kind are reported together, before anything starts.
`megatron-rl train CONFIG --dry-run` prints the resolved configuration, and a run keeps it as `config.toml` in its folder.

"Not set" in the column of defaults means that the key is absent; the meaning says what happens then."""


def config_sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Each section with its dotted name, parents before children."""
    for key, field in model.model_fields.items():
        section = section_in(field)
        if section is not None:
            yield prefix + key, section
            yield from config_sections(section, f"{prefix}{key}.")


def section_in(field: FieldInfo) -> type[BaseModel] | None:
    """The section class that this field holds, if it is a section."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def type_of(field: FieldInfo) -> str:
    """The type with its bounds, in words."""
    return type_words(field.annotation, field.metadata)


NAMES = {int: "integer", float: "number", str: "string", bool: "true or false", Path: "path", Any: "any value"}


def type_words(kind: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """An annotation as a user would say it, for example "integer, at least 1" or "`a` or `b`"."""
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        unfolded = [part for item in more for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return type_words(inner, [*metadata, *unfolded])
    if get_origin(kind) in {Union, types.UnionType}:
        return " or ".join(type_words(part, metadata) for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {type_words(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "table" if get_args(kind)[1] is Any else f"table of {type_words(get_args(kind)[1])}s"
    return ", ".join([NAMES.get(kind) or kind.__name__, *bounds(metadata)])


def bounds(metadata: list[Any] | tuple[Any, ...]) -> Iterator[str]:
    """The bounds of a number and the pattern of a string."""
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=value):
                yield f"at least {value:g}"
            case annotated_types.Gt(gt=value):
                yield f"above {value:g}"
            case annotated_types.Le(le=value):
                yield f"at most {value:g}"
            case annotated_types.Lt(lt=value):
                yield f"below {value:g}"
            case _ if getattr(item, "pattern", None):
                yield f"matching `{item.pattern}`"


def default_of(field: FieldInfo) -> str:
    """The default in TOML's notation; "required" or "not set" where there is none."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return "not set" if value is None else f"`{toml(value)}`"


def toml(value: Any) -> str:
    """A plain value as TOML writes it."""
    match value:
        case bool() | str():
            return json.dumps(value)
        case Path():
            return json.dumps(str(value))
        case list() | tuple():
            return "[" + ", ".join(toml(item) for item in value) + "]"
        case dict():
            return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }" if value else "{}"
        case _:
            return f"{value}"


# --- command line


def command_line() -> str:
    """docs/command-line.md, from the typer app."""
    import typer.main

    from megatron_rl.launch.cli import app

    root = typer.main.get_command(app)
    commands = list(leaf_commands(root, "megatron-rl"))
    body = ["Commands: " + " · ".join(f"[{name}](#{anchor(full)})" for full, name, _ in commands)]
    for full, _, command in commands:
        body.append(f"## {full}")
        body += command_blocks(full, command)
    return page("Command line", "megatron_rl/launch/cli.py", COMMAND_LINE_INTRO, body)


COMMAND_LINE_INTRO = """After this page you can use each command of `megatron-rl`, with all of its options.

`bash scripts/setup.sh` installs the program as `.venv/bin/megatron-rl`. `--help` after a command prints the same text as this
page. The exit status is 0 on success, 1 when a run or a check fails, 2 when the input is wrong. A command whose usage
ends with `[--section.key VALUE ...]` takes every key of the [configuration](configuration.md) as an option."""


def leaf_commands(command: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Each command that runs something: its full name, the name without the program, the click command."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, path.removeprefix("megatron-rl "), command
        return
    for name, child in children.items():
        yield from leaf_commands(child, f"{path} {name}")


def command_blocks(full: str, command: Any) -> list[str]:
    """Usage, description, arguments and options of one command."""
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
    overrides = command.context_settings.get("ignore_unknown_options", False)
    words = [full, *(["[OPTIONS]"] if options else []), *(argument_name(item) for item in arguments)]
    blocks = [f"```text\n{' '.join([*words, *(['[--section.key VALUE ...]'] if overrides else [])])}\n```"]
    blocks.append(inspect.cleandoc(command.help or "").replace("<", "\\<"))
    if arguments:
        rows = [(f"`{argument_name(item)}`", prose(item.help or "")) for item in arguments]
        blocks.append(table(("argument", "meaning"), rows))
    if options:
        described = [(option_names(item), default_of_option(item), prose(item.help or "")) for item in options]
        blocks.append(table(("option", "default", "meaning"), described))
    return blocks


def argument_name(argument: Any) -> str:
    """As usage shows it; brackets around what may be left out."""
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def option_names(option: Any) -> str:
    """All spellings, with the kind of value that follows."""
    kind = "" if option.is_flag else f" {option.metavar or kind_of_value(option)}"
    return ", ".join(f"`{name}{kind}`" for name in option.opts)


def kind_of_value(option: Any) -> str:
    """What follows an option on the command line: TEXT, INT, FLOAT, PATH or the choices."""
    kind = option.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(choice.value) for choice in kind)
    return {str: "TEXT", list: "TEXT"}.get(get_origin(kind) or kind) or kind.__name__.upper()


def default_of_option(option: Any) -> str:
    """The default, the environment variable that stands in for it, or "required"."""
    if option.required:
        return "required"
    if option.envvar:
        return f"`${option.envvar}`"
    if option.is_flag or option.default is None or option.default == () or callable(option.default):
        return ""
    return f"`{option.default.value if isinstance(option.default, Enum) else option.default}`"


def anchor(heading: str) -> str:
    """The fragment that a heading gets, both on a forge and in mkdocs."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- metrics


def metrics() -> str:
    """docs/metrics.md, from the catalogue."""
    from megatron_rl.metrics.catalogue import CATALOGUE, SOURCES

    body = []
    for source, title in SOURCES.items():
        specs = [spec for spec in CATALOGUE if spec.source == source]
        rows = [
            (f"`{spec.name}`", prose(spec.unit), prose(spec.meaning), spec.reduction, ", ".join(spec.shown_in)) for spec in specs
        ]
        body += [f"## {source}", prose(title) + ".", table(("name", "unit", "meaning", "reduction", "shown in"), rows)]
    body += [
        "## summary.json",
        "A run in a few numbers; `steps` counts its steps.",
        table(("key", "from", "meaning"), summary_rows()),
    ]
    return page("Metrics", "megatron_rl/metrics/catalogue.py", METRICS_INTRO, body)


def summary_rows() -> list[tuple[str, ...]]:
    """Each key of summary.json, the metric that it is made from, and its meaning."""
    from megatron_rl.metrics import summary
    from megatron_rl.metrics.catalogue import CATALOGUE

    rows: list[tuple[str, ...]] = []
    for spec in CATALOGUE:
        if shown := spec.summary:
            ends = (f"{shown.key}_first{summary.EDGE}", f"{shown.key}_last{summary.EDGE}")
            keys = ends if shown.statistic == "ends" else (shown.key,)
            rows.append((", ".join(f"`{key}`" for key in keys), f"`{spec.name}`", prose(shown.meaning)))
    return rows + [(f"`{key}`", "all rows", prose(meaning)) for key, meaning in summary._OF_ALL_ROWS.items()]


METRICS_INTRO = """After this page you can say what each value that a run, its console, its summary and its report show means.

Every step writes one row with all of its values into `RUN/metrics.jsonl`, TensorBoard and, if asked for, W&B. The last column
names the other places. The reduction says how values of tokens, rollouts and ranks become the one of the step. In names, `{...}`
stands for a word or a number, and what is in brackets may be absent."""


# --- all of them


def generated_pages() -> dict[str, str]:
    """Each generated page by its path below docs/."""
    makers: dict[str, Callable[[], str]] = {
        "configuration.md": configuration,
        "command-line.md": command_line,
        "metrics.md": metrics,
    }
    return {name: make() for name, make in makers.items()} | api_pages()


def differences(pages: dict[str, str]) -> list[str]:
    """Unified diffs of what is in docs/ against what the code says; pages of units that are gone, too."""
    found = []
    for name, text in pages.items():
        path = DOCS / name
        present = path.read_text() if path.is_file() else ""
        if present != text:
            diff = difflib.unified_diff(present.splitlines(), text.splitlines(), f"docs/{name}", "the code", lineterm="", n=1)
            found.append("\n".join(diff))
    known = {DOCS / name for name in pages}
    found += [f"docs/api/{path.name}: no such unit any more" for path in sorted((DOCS / "api").glob("*.md")) if path not in known]
    return found


def write(pages: dict[str, str]) -> None:
    """Write all pages; remove those of units that are gone."""
    (DOCS / "api").mkdir(parents=True, exist_ok=True)
    for path in (DOCS / "api").glob("*.md"):
        if f"api/{path.name}" not in pages:
            path.unlink()
    for name, text in pages.items():
        (DOCS / name).write_text(text)


class Warnings(logging.Handler):
    """Keeps what griffe finds wrong in docstrings, such as an argument that the function does not have."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage().replace(f"{ROOT}/", ""))


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description="Writes the generated pages of docs/ from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; show what differs and exit with status 1")
    arguments = parser.parse_args()
    warnings = Warnings()
    logging.getLogger("griffe").addHandler(warnings)
    logging.getLogger("griffe").propagate = False
    pages = generated_pages()
    for text in warnings.found:
        print(f"docs: {text}", file=sys.stderr)
    if not arguments.check:
        write(pages)
        print(f"docs: {len(pages)} pages written", file=sys.stderr)
        return 1 if warnings.found else 0
    found = differences(pages)
    for text in found:
        print(text)
    if found:
        print(f"docs: {len(found)} pages differ from the code; run .venv/bin/python scripts/docs.py", file=sys.stderr)
    return 1 if found or warnings.found else 0


if __name__ == "__main__":
    sys.exit(main())
