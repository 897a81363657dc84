"""The import rules of the package, read from its source: who may import whom, and which third-party package appears where."""

import pytest

from tests.architecture.source import PACKAGE, Import, Module, imports, package_modules, resolve_own

# Lowest first: a unit may import only those above it in this list. A new unit is added in its place.
UNITS = (
    "errors",
    "topology",
    "config",
    "records",
    "wire",
    "metrics",
    "tasks",
    "processes",
    "weight_mapping",
    "precision",
    "inference",
    "rollouts",
    "batching",
    "objective",
    "keep_set",
    "optim",
    "engine",
    "conversion",
    "weight_sync",
    "planner",
    "trainer",
    "orchestrator",
    "preflight",
    "report",
    "attribution",
    "launch",
)

# The plugin runs in vLLM's processes: whatever it imports is loaded in every server.
PLUGIN = f"{PACKAGE}.inference.vllm.plugin"
PLUGIN_MAY_IMPORT = {"errors", "records", "wire", "precision"}

# Third-party packages that only these parts may import. The NCCL sender uses the sending half of vLLM's NCCL weight transfer
# engine, and so its protocol.
ONLY_IN = {"megatron": ("engine",), "vllm": ("inference.vllm.plugin", "inference.vllm.nccl")}

# Workers and the orchestrator are thousands of light processes; the config is read by all of them.
LIGHT_UNITS = {"topology", "config", "records", "metrics", "tasks", "processes", "rollouts", "batching", "orchestrator"}
HEAVY = {"torch", "megatron", "vllm", "transformers", "transformer_engine", "triton"}

# Of them, what loads none of the others, and is imported where it is needed (tests/unit/tasks/test_chat_template.py).
LIGHT_PARTS = {"transformers.utils.chat_template_utils.render_jinja_template"}

# Needed by some runs only, or slow to import: inside the function that needs them.
LAZY = {"reasoning_gym", "datasets", "wandb", "tensorboardX", "matplotlib"}

MODULES = package_modules()
NAMES = frozenset(module.name for module in MODULES)


def all_imports() -> list[tuple[Module, Import]]:
    """Each import of the package with the module that has it."""
    return [(module, item) for module in MODULES for item in imports(module)]


def own_unit(item: Import) -> str | None:
    """The unit of the package that is imported; "" for the package itself, None for anything else."""
    target = resolve_own(item.target, NAMES)
    return None if target is None else [*target.split("."), ""][1]


def report(module: Module, item: Import, rule: str) -> str:
    """One violation, as an editor can jump to it."""
    return f"{module.place}:{item.line}: imports {item.target}: {rule}"


def test_every_unit_has_its_place_in_the_order() -> None:
    unknown = sorted({module.unit for module in MODULES} - {"", *UNITS})
    assert not unknown, f"units without a place in UNITS: {unknown}; add each above all that import it"


def test_units_import_only_lower_units() -> None:
    rank = {unit: place for place, unit in enumerate(UNITS)}
    wrong = [
        report(module, item, f"{own_unit(item)} is not below {module.unit}")
        for module, item in all_imports()
        if own_unit(item) and module.unit != own_unit(item) and rank.get(own_unit(item), len(UNITS)) >= rank.get(module.unit, -1)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_without_cycles() -> None:
    """Imports inside functions count: such a cycle is still a cycle for the reader."""
    edges = {name: set() for name in NAMES}
    for module, item in all_imports():
        edges[module.name] |= {resolve_own(item.target, NAMES)} - {None, module.name}
    cycle = find_cycle(edges)
    assert not cycle, "import cycle: " + " -> ".join(cycle)


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Some cycle of a directed graph, first node repeated at its end; empty when there is none."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in finished:
            for successor in sorted(edges[node]):
                if cycle := visit(successor, [*path, node]):
                    return cycle
            finished.add(node)
        return []

    return next((cycle for node in sorted(edges) if (cycle := visit(node, []))), [])


def test_plugin_imports_only_what_it_may() -> None:
    wrong = [
        report(module, item, f"{PLUGIN} may import only {sorted(PLUGIN_MAY_IMPORT)} of this package")
        for module, item in all_imports()
        if module.name.startswith(PLUGIN)
        and own_unit(item)
        and not item.target.startswith(PLUGIN)
        and own_unit(item) not in PLUGIN_MAY_IMPORT
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("engine", ["vllm"])
def test_only_the_registry_names_an_inference_engine(engine: str) -> None:
    """All other modules use the protocol in `inference/engine.py`, so that another engine can replace this one."""
    folder = f"{PACKAGE}.inference.{engine}"
    wrong = [
        report(module, item, f"{folder} is reached through inference.registry.engine_of only")
        for module, item in all_imports()
        if f"{item.target}.".startswith(f"{folder}.")
        and not f"{module.name}.".startswith(f"{folder}.")
        and module.name != f"{PACKAGE}.inference.registry"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("package", "parts"), ONLY_IN.items())
def test_package_appears_in_its_parts_only(package: str, parts: tuple[str, ...]) -> None:
    allowed = tuple(f"{PACKAGE}.{part}." for part in parts)
    wrong = [
        report(module, item, f"{package} belongs into {', '.join(parts)} only")
        for module, item in all_imports()
        if item.target.split(".")[0] == package and not f"{module.name}.".startswith(allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_light_units_import_nothing_heavy() -> None:
    wrong = [
        report(module, item, f"{module.unit} runs in light processes")
        for module, item in all_imports()
        if module.unit in LIGHT_UNITS and item.target.split(".")[0] in HEAVY and item.target not in LIGHT_PARTS
    ]
    assert not wrong, "\n".join(wrong)


def test_wire_imports_heavy_packages_inside_functions_only() -> None:
    wrong = [
        report(module, item, "wire is shared with light processes; import it inside the function that needs it")
        for module, item in all_imports()
        if module.unit == "wire" and item.target.split(".")[0] in HEAVY and not item.deferred
    ]
    assert not wrong, "\n".join(wrong)


def test_optional_packages_are_imported_lazily() -> None:
    wrong = [
        report(module, item, "import it inside the function that needs it")
        for module, item in all_imports()
        if item.target.split(".")[0] in LAZY and not item.deferred
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_rank_pool_imports_what_chooses_the_cpu() -> None:
    """Importing engine/rank_imports.py hides the GPUs from the entire process."""
    module = f"{PACKAGE}.engine.rank_imports"
    importers = {importer.name for importer, item in all_imports() if resolve_own(item.target, NAMES) == module}
    assert importers == {f"{PACKAGE}.engine.rank_pool"}
