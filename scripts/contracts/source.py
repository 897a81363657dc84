"""Reading a library's source without importing the library: its syntax tree, and single definitions of it executed alone."""

import ast
import builtins
import copy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.errors import RunError

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class ChangedSourceError(RunError):
    """The library's source has no longer what these contracts are derived from."""


@cache
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        ChangedSourceError: There is no such file.
    """
    if not file.exists():
        raise ChangedSourceError(
            f"{file}: the library has no such module any more; find where it went, and change scripts/contracts"
        )
    return ast.parse(file.read_text(encoding="utf-8"))


def module_file(root: Path, name: str) -> Path | None:
    """The file of the module `name` below `root`, or None."""
    path = root.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def definition(file: Path, name: str) -> Definition:
    """A class, a function, or with a dotted name a method.

    Raises:
        ChangedSourceError: The file has none of this name.
    """
    node: Any = tree_of(file)
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        node = next((n for n in node.body if isinstance(n, kinds) and n.name == part), None)
        if node is None:
            raise ChangedSourceError(f"{file} has no {name} any more; find what replaces it, and change scripts/contracts")
    return node


def top_names(file: Path) -> Iterator[str]:
    """What `from module import name` finds: definitions, assignments and imports at the top of the module, also under an if."""
    for node in _top_statements(tree_of(file).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _top_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_statements([*node.body, *node.orelse])
        if isinstance(node, ast.Try):
            yield from (inner for handler in node.handlers for inner in _top_statements(handler.body))


def fields_of(file: Path, name: str) -> dict[str, str]:
    """Name and type of each annotated field of a class, without those of its bases."""
    body = definition(file, name).body
    return {
        n.target.id: ast.unparse(n.annotation) for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def all_fields(file: Path, name: str) -> dict[str, str]:
    """The same with the fields of the bases that are in the same file."""
    node = definition(file, name)
    assert isinstance(node, ast.ClassDef)
    local = {n.name for n in tree_of(file).body if isinstance(n, ast.ClassDef)}
    inherited = [all_fields(file, base.id) for base in node.bases if isinstance(base, ast.Name) and base.id in local]
    return {k: v for fields in (*inherited, fields_of(file, name)) for k, v in fields.items()}


def required_fields(file: Path, name: str) -> list[str]:
    """Names of a dataclass' fields without a default, those of bases in the same file first."""
    node = definition(file, name)
    assert isinstance(node, ast.ClassDef)
    local = {n.name for n in tree_of(file).body if isinstance(n, ast.ClassDef)}
    inherited = [required_fields(file, base.id) for base in node.bases if isinstance(base, ast.Name) and base.id in local]
    own = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.value is None]
    return [name for names in (*inherited, own) for name in names]


def signature(file: Path, name: str) -> list[str]:
    """Names of a function's arguments; those with a default end in "="."""
    node = definition(file, name)
    assert not isinstance(node, ast.ClassDef)
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    required = len(positional) - len(a.defaults)
    names = [arg.arg + ("=" if n >= required else "") for n, arg in enumerate(positional)]
    names += ["*" + a.vararg.arg] if a.vararg else []
    names += [arg.arg + ("=" if default is not None else "") for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return names + (["**" + a.kwarg.arg] if a.kwarg else [])


def execute(file: Path, names: list[str], given: Mapping[str, Any]) -> SimpleNamespace:
    """Run only these definitions of a file, in the file's order.

    An annotation with a name that is neither in `given` nor among the definitions becomes typing.Any. What bodies, decorators and
    bases need has to be in `given`; a definition that comes to need more fails with a NameError that names it.
    """
    nodes = sorted((definition(file, name) for name in names), key=lambda node: node.lineno)
    namespace: dict[str, Any] = {"__name__": file.stem, "Any": Any, **given}
    known = {*namespace, *dir(builtins), *(node.name for node in nodes)}
    for node in nodes:
        plain = ast.fix_missing_locations(_PlainAnnotations(known).visit(copy.deepcopy(node)))
        exec(compile(ast.Module([plain], []), str(file), "exec"), namespace)
    return SimpleNamespace(**{node.name: namespace[node.name] for node in nodes})


class _PlainAnnotations(ast.NodeTransformer):
    """Replaces annotations that name what is not there."""

    def __init__(self, known: set[str]) -> None:
        self._known = known

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("annotation", "returns"):
            value = getattr(node, name, None)
            if value is not None and any(isinstance(n, ast.Name) and n.id not in self._known for n in ast.walk(value)):
                setattr(node, name, ast.Name("Any", ast.Load()))
        return super().generic_visit(node)
