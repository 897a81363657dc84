"""Which matrices of a model are quantised."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from megatron_rl.config.sections import Precision
from megatron_rl.precision.nvfp4 import BLOCK, QuantisationError
from megatron_rl.weight_mapping import HeldParameter, Parameter, ParameterTable, Role

KERNEL_INPUTS = 32
"""An FP4 product of two matrices sums over a multiple of this: its operands are aligned to 16 bytes."""
ROLES = {"attention": Role.ATTENTION, "mlp": Role.MLP, "experts": Role.EXPERT}
"""Roles by the names in [precision] modules."""


class Selection:
    """The quantised parameters of one model, and which of them share a global scale.

    Args:
        table: The model's parameters.
        modules: Keys of ROLES.
        exclude: Patterns of Hugging Face module names, matched segment by segment from the first one.

    Raises:
        QuantisationError: Lists everything that NVFP4 or a server's fused matrices do not allow.
    """

    def __init__(self, table: ParameterTable, modules: Sequence[str] = tuple(ROLES), exclude: Sequence[str] = ()) -> None:
        roles = {ROLES[name] for name in modules}
        candidates = [parameter for parameter in table.parameters if parameter.role.has_matrices and parameter.role in roles]
        left_out = {name for parameter in candidates for name in module_names(parameter) if _matches_any(name, exclude)}
        self.parameters = tuple(p for p in candidates if not left_out.issuperset(module_names(p)))
        _raise(
            _unknown_patterns(table, exclude)
            + _split_up(candidates, left_out)
            + _stacked(self.parameters)
            + _uneven(self.parameters)
        )
        self.groups: tuple[str, ...] = tuple(dict.fromkeys(_group(parameter) for parameter in self.parameters))
        """Names of the quantisation groups, each with one global scale, in the table's order."""
        self.group_of: dict[str, str] = {t.name: _group(p) for p in self.parameters for t in p.hf}
        """Group of each quantised tensor, by its Hugging Face name."""

    @property
    def names(self) -> set[str]:
        """Megatron's names, with global numbers."""
        return {parameter.name for parameter in self.parameters}


def selection_of(section: Precision, table: ParameterTable) -> Selection:
    """What trainer or servers quantise; nothing where neither does."""
    quantises = section.training != "full" or section.rollouts == "nvfp4"
    return Selection(table, section.modules if quantises else (), section.exclude if quantises else ())


def check_shards(section: Precision, parameters: Iterable[HeldParameter]) -> None:
    """Return if each rank's shards can be quantised, and multiplied as the section says.

    Args:
        section: The run's section [precision].
        parameters: The quantised ones.

    Raises:
        QuantisationError: A shard would cut through blocks, or has a size that FP4 kernels do not take; lists all.
    """
    native = section.training == "native"
    multiples = {
        "inputs": KERNEL_INPUTS if native else BLOCK,
        "outputs": (KERNEL_INPUTS if section.backward == "nvfp4" else BLOCK) if native else 1,
    }
    wrong = {
        f"{held.parameter.template}: {held.parameter.shape[dim]} {name} over {held.num_shards} ranks are {held.shape[dim]} "
        f"per rank, not a multiple of {multiples[name]}; use a smaller layout.tensor or layout.expert_tensor, or exclude it"
        for held in parameters
        for name, dim in (("inputs", -1), ("outputs", 0))
        if held.shape[dim] % multiples[name]
    }
    _raise(sorted(wrong))


def module_names(parameter: Parameter) -> list[str]:
    """Hugging Face names of the linear layers that a parameter is made of."""
    return [tensor.name.removesuffix(".weight") for tensor in parameter.hf]


def matches(name: str, pattern: str) -> bool:
    """Whether the pattern is the name of the module, or of one that contains it."""
    segments, wanted = name.split("."), pattern.split(".")
    return len(wanted) <= len(segments) and all(map(fnmatchcase, segments, wanted))


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _group(parameter: Parameter) -> str:
    assert parameter.quantisation_group is not None, f"{parameter.name} has no matrices"
    return parameter.quantisation_group


def _unknown_patterns(table: ParameterTable, exclude: Sequence[str]) -> list[str]:
    modules = [name for parameter in table.parameters for name in module_names(parameter)]
    return [f"exclude: {pattern!r} matches no module" for pattern in exclude if not any(matches(m, pattern) for m in modules)]


def _split_up(candidates: Sequence[Parameter], left_out: set[str]) -> list[str]:
    """What a server fuses into one matrix or one kernel (all experts of a layer) is quantised completely or not at all."""
    fused: dict[object, set[str]] = defaultdict(set)
    for parameter in candidates:
        fused[("experts of layer", parameter.layer) if parameter.is_expert else _group(parameter)].update(module_names(parameter))
    return [
        f"exclude: leaves out {', '.join(sorted(names & left_out)[:3])} but not {', '.join(sorted(names - left_out)[:3])}, "
        "which servers fuse with them; exclude all of these or none"
        for names in fused.values()
        if names & left_out and names - left_out
    ]


def _stacked(parameters: Sequence[Parameter]) -> list[str]:
    names = sorted({tensor.name for parameter in parameters for tensor in parameter.hf if tensor.index is not None})
    return [f"{name}: all experts are one tensor (GPT-OSS), for which servers have no NVFP4 format; exclude it" for name in names]


def _uneven(parameters: Sequence[Parameter]) -> list[str]:
    shapes = {(parameter.template, parameter.shape) for parameter in parameters if parameter.shape[-1] % BLOCK}
    return [f"{name}: {shape[-1]} inputs are not a multiple of {BLOCK}; exclude it" for name, shape in sorted(shapes)]


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise QuantisationError(
            "this model cannot be quantised with these settings ([precision] modules, exclude):\n  " + "\n  ".join(problems)
        )
