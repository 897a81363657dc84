"""The API pages of docs/, read from the source by griffe without an import; and the Markdown that all generated pages share."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_rl"
GENERATED = "<!-- Written by scripts/docs.py from {source}. Change that, then run the script again. -->"


def page(title: str, source: str, intro: str, body: list[str]) -> str:
    """One generated page: title, notice, what a reader can do after it, then the body's blocks."""
    return "\n\n".join([f"# {title}", GENERATED.format(source=source), intro, *body]) + "\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; its cells are on one line each."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Text that stays inside one cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def prose(text: str) -> str:
    """Text of a docstring as Markdown: outside code, signs that would become HTML, emphasis or links stand for themselves."""
    pieces = re.split(r"(```.*?```|`[^`]*`|^(?: {4}|\t).*$)", text, flags=re.DOTALL | re.MULTILINE)
    special = r"([<*]|(?<!\w)_|_(?!\w)|(?<=\])\()"
    return "".join(piece if place % 2 else re.sub(special, r"\\\1", piece) for place, piece in enumerate(pieces))


def api_pages() -> dict[str, str]:
    """docs/api/: one page a unit, and an index. Keys are paths below docs/."""
    package = griffe.load(
        PACKAGE,
        search_paths=[ROOT],
        allow_inspection=False,
        docstring_parser=griffe.Parser.google,
        docstring_options={"returns_multiple_items": False, "returns_named_value": False},
    )
    pages, rows = {}, []
    for name in sorted(package.members):
        unit = package.members[name]
        if unit.is_alias or not unit.is_module or name.startswith("_"):
            continue
        body = [block for module in modules_of(unit) for block in module_blocks(module)]
        pages[f"api/{name}.md"] = page(unit.path, source_of(unit), docstring_text(unit), body)
        rows.append((f"[{name}]({name}.md)", summary_of(unit)))
    pages["api/README.md"] = page("API", f"the docstrings of {PACKAGE}/", API_INTRO, [table(("unit", "what it is"), rows)])
    return pages


API_INTRO = """After this page you can find any public class and function of the package, with its arguments, results and errors.

The package is a program first. What you write yourself meets few of these classes: a reward and an environment
([your own task](../your-own-task.md)), a model family ([conversion](../conversion.md#add-a-model-family)), or the
[keep-set operation](../keep-set.md) used alone."""


def source_of(thing: Any) -> str:
    """The file that a module is in, relative to the repository."""
    return str(Path(thing.filepath).relative_to(ROOT)).removesuffix("/__init__.py")


def modules_of(module: Any) -> Iterator[Any]:
    """The module and all below it, by name; private ones left out, `__main__` too."""
    yield module
    for name in sorted(module.members):
        member = module.members[name]
        if not member.is_alias and member.is_module and not name.startswith("_"):
            yield from modules_of(member)


def module_blocks(module: Any) -> Iterator[str]:
    """One module: what it is about, then its public classes and functions in the order of the source."""
    own = [item for item in module.members.values() if documented(item)]
    is_unit = module.path.count(".") == 1
    if not own:
        return
    yield f"## {module.path}"
    if module.docstring and not is_unit:
        yield docstring_text(module)
    for item in own:
        yield from class_blocks(item) if item.is_class else function_blocks(item, item.name, "###")


def documented(item: Any) -> bool:
    """A public class or function that this module defines."""
    return not item.is_alias and (item.is_class or item.is_function) and not item.name.startswith("_")


def class_blocks(item: Any) -> Iterator[str]:
    """A class: its head, text, fields and public methods."""
    yield f"### {item.name}"
    yield f"```python\n{class_head(item)}\n```"
    if item.docstring:
        yield docstring_text(item)
    members = [member for member in item.members.values() if not member.is_alias and not member.name.startswith("_")]
    fields = [member for member in members if member.is_attribute and ("property" in member.labels or member.annotation)]
    if fields:
        yield table(
            ("field", "type", "meaning"), [(f"`{field.name}`", field_type(field), field_meaning(field)) for field in fields]
        )
    for member in members:
        if member.is_function:
            yield from function_blocks(member, f"{item.name}.{member.name}", "####")


def class_head(item: Any) -> str:
    """The class with its bases, and how one is made where `__init__` says it."""
    bases = ", ".join(str(base) for base in item.bases)
    head = f"class {item.name}{f'({bases})' if bases else ''}"
    made = item.members.get("__init__")
    if made is None or made.is_alias or not made.is_function or "dataclass" in item.labels:
        return head
    return f"{head}\n\n{signature(made).replace('__init__', item.name, 1).removesuffix(' -> None')}"


def field_type(field: Any) -> str:
    """The annotation, and the default where there is a short one."""
    default = "" if "property" in field.labels or field.value is None else code_text(field.value)
    return code(field.annotation) + (
        f" = `{default}`" if default and len(default) <= 30 and not re.search(r"\||^field\(", default) else ""
    )


def field_meaning(field: Any) -> str:
    """The docstring, or the comment on the field's line, which holds its shape."""
    if field.docstring:
        return one_line(field)
    _, _, comment = field.source.partition("  # ")
    return prose(comment.strip()) if not comment.startswith(("noqa", "type:")) else ""


def function_blocks(item: Any, name: str, level: str) -> Iterator[str]:
    """A function or method: its signature and docstring."""
    yield f"{level} {name}"
    yield f"```python\n{'async ' if 'async' in item.labels else ''}def {signature(item)}\n```"
    if item.docstring:
        yield docstring_text(item)


def signature(item: Any) -> str:
    """As in the source, without `self`; one parameter a line where it would be long."""
    text = re.sub(r"\((self|cls)(, )?", "(", item.signature(), count=1)
    if len(text) <= 110:
        return text
    returns = f" -> {item.returns}" if item.returns is not None else ""
    inside = text[len(item.name) + 1 : len(text) - len(returns) - 1]
    return f"{item.name}(\n" + "".join(f"    {parameter},\n" for parameter in split_parameters(inside)) + f"){returns}"


def split_parameters(text: str) -> list[str]:
    """Parameters of a signature: split at commas outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def docstring_text(item: Any) -> str:
    """All sections of a docstring."""
    return "\n\n".join(section_text(section) for section in item.docstring.parsed) if item.docstring else ""


def section_text(section: Any) -> str:
    """One section: text as it is, named things as a list."""
    kind = section.kind.value
    if kind == "text":
        return prose(section.value)
    title = {"parameters": "Args", "other parameters": "Args"}.get(kind, kind.capitalize())
    if kind in {"admonition", "deprecated"}:
        return f"**{section.title or title}**: {prose(str(section.value.description))}"
    if kind == "examples":
        return "\n\n".join(text if "text" in str(part) else f"```python\n{text}\n```" for part, text in section.value)
    lines = [list_item(getattr(entry, "name", "") or code_text(entry.annotation), entry.description) for entry in section.value]
    return f"**{title}**\n\n" + "\n".join(lines)


def list_item(name: str, description: str) -> str:
    """One entry of Args, Returns or Raises."""
    head = f"`{name}`: " if name else ""
    return f"- {head}{prose(' '.join(description.split()))}"


def one_line(item: Any) -> str:
    """The docstring as one line for a table."""
    return prose(" ".join(item.docstring.value.split())) if item.docstring else ""


def summary_of(item: Any) -> str:
    """The first sentence or paragraph of a docstring."""
    return prose(" ".join(item.docstring.value.split("\n\n")[0].split())) if item.docstring else ""


def code(annotation: Any) -> str:
    """An annotation as code; nothing where there is none."""
    return " or ".join(f"`{part}`" for part in alternatives(code_text(annotation)))


def alternatives(text: str) -> list[str]:
    """The parts of a union outside brackets; a pipe inside a table's code shows its backslash in mkdocs."""
    parts, depth = [""], 0
    for word in text.split(" "):
        if word == "|" and depth == 0:
            parts.append("")
            continue
        depth += word.count("[") - word.count("]")
        parts[-1] += f" {word}" if parts[-1] else word
    return [part for part in parts if part]


def code_text(annotation: Any) -> str:
    """An annotation on one line."""
    return " ".join(str(annotation).split()) if annotation is not None else ""
