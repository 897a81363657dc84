"""The documentation against the repository: links, the navigation, and every command, option, path and key that a page names.

Not proved here: that what the sentences say is true. Links and anchors between the pages of docs/ are mkdocs' business, too
(scripts/lint.sh).
"""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from pydantic import BaseModel

from megatron_rl.config.tree import Config
from megatron_rl.launch.cli import app
from tests.architecture.source import PACKAGE, REPOSITORY

DOCS = REPOSITORY / "docs"
AT_TOP = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
GENERATED = {"configuration.md", "command-line.md", "metrics.md"}
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [
    path for path in [*AT_TOP, REPOSITORY / "slurm/README.md", *PAGES] if path.parent.name != "api" and path.name not in GENERATED
]
"""Written by hand."""

MOST_README_BYTES = 10_000

PROGRAM = ".venv/bin/megatron-rl"
TOP_FOLDERS = ("scripts", "slurm", "tests", "model_configs", "docs", ".ci", PACKAGE)

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")


def place(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for kind, text in BLOCK.findall(path.read_text()) if kind == language]


def prose_of(path: Path) -> str:
    """A page without its fenced blocks."""
    return BLOCK.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The fragments of a page's headings, as a forge makes them."""
    headings = HEADING.findall(prose_of(path))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", WRITTEN, ids=place)
def test_relative_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for target in LINK.findall(prose_of(path)):
        if "://" in target:
            continue
        file, _, fragment = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        if not to.exists():
            wrong.append(f"{target}: no such file")
        elif fragment and fragment not in anchors(to):
            wrong.append(f"{target}: no such heading; {place(to)} has {sorted(anchors(to))}")
    assert not wrong, "\n".join(wrong)


def test_readme_is_one_page() -> None:
    size = (REPOSITORY / "README.md").stat().st_size
    assert size <= MOST_README_BYTES, f"README.md has {size} bytes, at most {MOST_README_BYTES}: move it to docs/"


def test_every_page_is_in_the_navigation_and_in_the_list_of_pages() -> None:
    navigation = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    named = [page for part in navigation for entry in next(iter(part.values())) for page in entry.values()]
    pages = {str(path.relative_to(DOCS)) for path in PAGES}
    assert sorted(named) == sorted(pages)
    listed = {target for path in (DOCS / "README.md", REPOSITORY / "README.md") for target in LINK.findall(path.read_text())}
    missing = [page for page in pages - {"README.md"} if not page.startswith("api/") and page not in listed]
    assert not missing, f"docs/README.md does not list {missing}"


@pytest.mark.parametrize("path", [path for path in PAGES if path.parent == DOCS or path.name == "README.md"], ids=place)
def test_a_page_begins_with_what_a_reader_can_do_after_it(path: Path) -> None:
    title, first = [part for part in path.read_text().split("\n\n") if not part.startswith("<!--")][:2]
    assert title.startswith("# ")
    assert first.startswith("After this page you"), first


def test_generated_pages_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


# ---- commands


@dataclass(frozen=True)
class CommandLine:
    """One command of a shell block."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def command_lines() -> Iterator[CommandLine]:
    """The commands of all shell blocks, and `megatron-rl ...` where a sentence names a command."""
    for path in WRITTEN:
        for line in "".join(blocks(path, "bash")).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables before the command
                words.pop(0)
            if words:
                yield CommandLine(place(path), tuple(words))
        for code in CODE.findall(prose_of(path)):
            words = code.split()
            if words[0] in {"megatron-rl", PROGRAM} and len(words) > 1:
                yield CommandLine(place(path), (PROGRAM, *words[1:]))


COMMAND_LINES = list(command_lines())


@pytest.mark.parametrize("line", COMMAND_LINES, ids=str)
def test_commands_and_their_options_exist(line: CommandLine) -> None:
    words = list(line.words)
    if words[0] in {PROGRAM, "megatron-rl"}:
        check_own_command(words[1:])
    elif words[0] == "bash" or words[:1] == [".venv/bin/python"]:
        check_script(words[1:])
    else:
        assert words[0] in {"export", "python3.12", ".venv/bin/pip", ".venv/bin/tensorboard"}, f"unknown command {words[0]}"


def check_own_command(words: list[str]) -> None:
    """A command of megatron-rl with its options and overrides."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"there is no command {words[:1]}; there are {sorted(command.commands)}"
    known = {name for option in command.params for name in option.opts} | {"--help"}
    for option in (word.partition("=")[0] for word in words if word.startswith("-") and not re.match(r"-\d", word)):
        if "." in option:
            assert command.context_settings.get("ignore_unknown_options"), f"{command.name} takes no overrides"
            check_key(option.removeprefix("--"))
        else:
            assert option in known, f"{command.name} has no option {option}; it has {sorted(known)}"
    check_paths(words)


def check_script(words: list[str]) -> None:
    """A script of the repository, or a module run by -m, with options that its text names."""
    if words[0] == "-m":
        assert words[1] in {"pytest", "mkdocs"}
        check_paths(words[2:])
        return
    script = REPOSITORY / words[0]
    assert script.is_file(), f"there is no {words[0]}"
    passed_to_pytest = words[0] == "scripts/test.sh"
    for option in [] if passed_to_pytest else [word.partition("=")[0] for word in words[1:] if word.startswith("-")]:
        if "." in option:
            check_key(option.removeprefix("--"))
        else:
            assert option in script.read_text() or (words[0] == "scripts/demo.sh" and option == "--resume"), (
                f"{words[0]}: {option}"
            )
    check_paths(words[1:])


def check_paths(words: list[str]) -> None:
    """Words that are paths in the repository."""
    for word in words:
        if word.split("/")[0] in TOP_FOLDERS and "/" in word:
            assert (REPOSITORY / word).exists(), f"there is no {word}"


# ---- names in sentences


def check_key(dotted: str) -> None:
    """A key of the configuration; below a table that takes anything, any key."""
    model: type[BaseModel] = Config
    *sections, key = dotted.split(".")
    for name in sections:
        assert name in model.model_fields, f"{dotted}: {model.__name__} has no {name}"
        kind = model.model_fields[name].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return
        model = kind
    assert key in model.model_fields, f"{dotted}: {model.__name__} has no {key}; it has {sorted(model.model_fields)}"


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.name != "CHANGELOG.md"], ids=place)
def test_names_in_sentences_exist(path: Path) -> None:
    """Paths of the repository, modules of the package, keys of the configuration."""
    wrong = []
    for code in CODE.findall(prose_of(path)):
        try:
            check_name(code)
        except AssertionError as error:
            wrong.append(f"{code}: {error}")
    assert not wrong, "\n".join(wrong)


FILE_ENDINGS = (".json", ".jsonl", ".toml", ".py", ".md", ".txt", ".log", ".html", ".sh", ".sbatch")


def check_name(code: str) -> None:
    """Whatever the code of a sentence looks like."""
    word = next(iter(code.split()), "")
    if re.fullmatch(rf"{PACKAGE}(\.\w+)+", word):
        path = REPOSITORY / word.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), "no such module"
    elif "/" in word and word.split("/")[0] in TOP_FOLDERS and not re.search(r"[{*]", word):
        assert (REPOSITORY / word).exists(), "no such path"
    elif (
        re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word)
        and word.split(".")[0] in Config.model_fields
        and not word.endswith(FILE_ENDINGS)
    ):
        check_key(word)


def test_every_key_of_the_configuration_has_a_meaning() -> None:
    rows = [line for line in (DOCS / "configuration.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [line for line in rows if line.endswith("|  |")]


@pytest.mark.parametrize("path", WRITTEN, ids=place)
def test_examples_of_the_configuration_have_known_keys(path: Path) -> None:
    for text in blocks(path, "toml"):
        for dotted in leaves(tomllib.loads(text), ""):
            check_key(dotted)


def leaves(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    """Dotted names of all values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key
