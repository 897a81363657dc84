"""What the architecture tests look at: the project's Python files as syntax trees, and the list of files that git tracks.

Nothing of the project is imported here: a rule about imports must not depend on whether the imports work.
"""

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_rl"


@dataclass(frozen=True)
class Import:
    """One imported module, wherever in the file the statement is."""

    target: str
    """Dotted absolute name as written, e.g. "megatron_rl.records.rollout"; of `from a import b` it is "a.b"."""
    line: int
    deferred: bool
    """True when importing the module does not run it: in a function, or for type checkers only."""


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    """Dotted name from the repository's root, e.g. "megatron_rl.config.tree"; of an `__init__.py` that of its package."""
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def place(self) -> str:
        """The path for messages, relative to the repository."""
        return str(self.path.relative_to(REPOSITORY))

    @property
    def unit(self) -> str:
        """The top-level part of the package that this module belongs to; "" for the package's own `__init__`."""
        return [*self.name.split("."), ""][1]


def read_module(path: Path) -> Module:
    """Parse one file of the repository."""
    text = path.read_text()
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(text, filename=str(path)), len(text.splitlines()))


@functools.cache
def package_modules() -> tuple[Module, ...]:
    """Every module of the package, committed or not."""
    return tuple(read_module(path) for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")))


@functools.cache
def all_modules() -> tuple[Module, ...]:
    """Every Python file of the package, the tests and the scripts."""
    others = (path for folder in ("scripts", "tests") for path in sorted((REPOSITORY / folder).rglob("*.py")))
    return (*package_modules(), *(read_module(path) for path in others))


@functools.cache
def tracked_files() -> tuple[Path, ...] | None:
    """Files that git tracks, relative to the repository; None where this is no git checkout."""
    if not (REPOSITORY / ".git").exists():
        return None
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    # A file that is deleted on disk but still in the index is about to be removed.
    return tuple(Path(name) for name in listing.stdout.split("\0") if name and (REPOSITORY / name).exists())


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, also those by `importlib.import_module("literal")`."""
    yield from _imports_below(module.tree, module, deferred=False)


def _imports_below(node: ast.AST, module: Module, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, module):
            yield Import(target, child.lineno, deferred)
        yield from _imports_below(child, module, deferred or _defers(child))


def _defers(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return True
    return False


def _targets(node: ast.AST, module: Module) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(names=names, level=level, module=source):
            prefix = ".".join(part for part in (_relative_base(module, level), source) if part)
            return [f"{prefix}.{alias.name}" for alias in names]
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"), args=[first, *_]):
            return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def _relative_base(module: Module, level: int) -> str:
    """The package that `level` dots in front of a relative import mean; "" for an absolute one."""
    if level == 0:
        return ""
    levels_up = level - 1 if module.path.name == "__init__.py" else level
    parts = module.name.split(".")
    return ".".join(parts[: len(parts) - levels_up])


def resolve_own(target: str, names: frozenset[str]) -> str | None:
    """The project's own module that an import target means, or None: "megatron_rl.a.f" is module "megatron_rl.a" if f is no
    module."""
    if target.split(".", maxsplit=1)[0] != PACKAGE:
        return None
    while target not in names and "." in target:
        target = target.rpartition(".")[0]
    return target
