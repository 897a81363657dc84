"""What the package imports from the libraries, and whether their source has it."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from .program import imports
from .source import module_file, signature, top_names, tree_of


def import_facts(roots: Mapping[str, Path]) -> dict[str, dict[str, list[str] | bool]]:
    """By package and import: arguments of a function, true for anything else that is there, false for what is not."""
    return {package: {line: found_in(roots[package], line) for line in lines} for package, lines in imports().items() if lines}


def missing_in(facts: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Imports of the package that the libraries do not have."""
    return [f"{package} has no {line}" for package, lines in facts.items() for line, found in lines.items() if found is False]


def found_in(root: Path, line: str) -> list[str] | bool:
    """Whether the source below `root` has "module: name"; for a function of that module its arguments."""
    module, _, name = line.partition(": ")
    file = module_file(root, module)
    if file is None:
        return root.joinpath(*module.split(".")).is_dir()  # a namespace package, which has no file of its own
    if not name:
        return True
    if any(isinstance(n, ast.FunctionDef) and n.name == name for n in tree_of(file).body):
        return signature(file, name)
    if name in set(top_names(file)) or module_file(root, f"{module}.{name}") is not None:
        return True
    return _made_lazily(file, name) or any(found_in(root, f"{of}: {name}") is not False for of in _star_imports(module, file))


def _star_imports(module: str, file: Path) -> Iterator[str]:
    """Modules all of whose names a package takes over."""
    for node in tree_of(file).body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield f"{module}.{node.module}" if node.level else str(node.module)


def _made_lazily(file: Path, name: str) -> bool:
    """A module's __getattr__ may make a name (vllm.platforms.current_platform)."""
    lazy = [n for n in tree_of(file).body if isinstance(n, ast.FunctionDef) and n.name == "__getattr__"]
    return any(isinstance(c, ast.Constant) and c.value == name for n in lazy for c in ast.walk(n))
