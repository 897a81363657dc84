"""The error classes of the package: each states whether a user can fix it, and no name is used twice."""

import ast
import builtins

from tests.architecture.source import package_modules

ROOTS = {"UserError", "RunError"}
"""megatron_rl/errors.py: what a user can fix, and a fault of a running program."""

BUILTINS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}


def error_classes() -> dict[str, list[tuple[str, set[str]]]]:
    """Each exception class of the package by name: where it is, and the names of its bases."""
    classes = [
        (node.name, f"{module.place}:{node.lineno}", {base_name(base) for base in node.bases})
        for module in package_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    errors = ROOTS | BUILTINS
    while True:  # a class whose base is an exception is one
        found = {name for name, _, bases in classes if bases & errors} - errors
        if not found:
            break
        errors |= found
    named: dict[str, list[tuple[str, set[str]]]] = {}
    for name, place, bases in classes:
        if bases & errors:
            named.setdefault(name, []).append((place, bases))
    return named


def base_name(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def test_every_error_is_the_users_or_the_runs() -> None:
    classes = error_classes()
    known = set(ROOTS)
    while new := {name for name, places in classes.items() if any(bases & known for _, bases in places)} - known:
        known |= new
    wrong = [f"{place}: {name}" for name, places in classes.items() for place, _ in places if name not in known]
    assert not wrong, "derive them from errors.UserError or errors.RunError:\n" + "\n".join(wrong)


def test_an_error_is_of_one_kind() -> None:
    both = [place for places in error_classes().values() for place, bases in places if bases >= ROOTS]
    assert not both, f"UserError and RunError at once: {both}"


def test_names_of_errors_are_unique_end_in_error_and_shadow_nothing() -> None:
    classes = error_classes()
    assert not {name: places for name, places in classes.items() if len(places) > 1}
    assert not [places for name, places in classes.items() if name in BUILTINS]
    assert not [places for name, places in classes.items() if not name.endswith("Error")]
    assert classes.keys() >= ROOTS, "the search itself finds what is there"
