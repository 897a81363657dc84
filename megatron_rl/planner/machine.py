"""What a machine can do: peaks from its data sheet, and the fraction of each peak that programs reach.

The values are in machines.toml.
"""

import tomllib
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from megatron_rl.errors import UserError


class MachineError(UserError, ValueError):
    """An unknown machine, or a machine whose table is incomplete or wrong."""


@dataclass(frozen=True)
class Machine:
    """One accelerator, its links and its part of a node. Bandwidths are GB/s (1e9 bytes) in one direction, per accelerator."""

    name: str
    memory_gib: float
    bf16_tflops: float
    """Peak of dense products, without structured sparsity; the next two as well."""
    fp8_tflops: float
    fp4_tflops: float
    hbm_gb_s: float
    nvlink_gb_s: float
    network_gb_s: float
    nvlink_domain: int
    """Number of accelerators that are connected by NVLink."""
    host_memory_gib: float
    """Host memory of a node, divided by its accelerators."""
    matmul_efficiency: float
    """Fraction of the peak that the dense linear layers of a large model reach."""
    expert_efficiency: float
    """Fraction of the peak that a grouped GEMM with many rows per expert reaches."""
    expert_half_rows: float
    """Rows per expert at which a grouped GEMM reaches half of its efficiency."""
    attention_efficiency: float
    memory_efficiency: float
    """Fraction of HBM's bandwidth that all other operations reach."""
    link_efficiency: float
    """Fraction of the bandwidth of NVLink and the network that collectives reach."""
    layer_overhead_us: float
    """Time of one layer's forward pass for kernel launches, and for waiting where sizes are only known on the device."""
    step_overhead_s: float
    """Time of a step outside the passes, collectives and the update."""
    latency_us: float
    """Latency of one collective inside a node; across nodes it is three times as long."""
    decode_efficiency: float
    """Fraction of HBM's bandwidth that a server reaches in decoding."""
    decode_overhead_ms: float
    """Time of one decoding step beyond reading weights and KV caches."""
    reserved_gib: float
    """Memory of the driver, the communicators' buffers and the libraries' workspaces on each accelerator."""
    fragmentation: float
    """Memory that the allocator holds but does not use, as a fraction of activations and workspace."""
    activation_factor: float = 1.0
    """Factor on the bytes that activations.py counts; above 1 if layers consist of unfused operations."""
    error_low: float = 0.7
    error_high: float = 1.4
    """Published or measured step times are between these multiples of the predicted one."""
    cores: float = 0.0
    """CPU cores of a machine whose ranks share them (two threads of one core count less than 2); 0 if each rank has its own
    accelerator."""
    source: str = ""

    def tflops(self, precision: str) -> float:
        """Peak of dense products in bf16, fp8 or nvfp4; of bf16 for any other precision."""
        return {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops, "nvfp4": self.fp4_tflops}.get(precision, self.bf16_tflops)


def known_machines() -> dict[str, Machine]:
    """The machines of machines.toml by name."""
    text = files("megatron_rl.planner").joinpath("machines.toml").read_text()
    return _read_all(tomllib.loads(text), "machines.toml", {})


def machine_named(name: str, file: Path | None = None) -> Machine:
    """Finds a machine in the built-in table or in a file.

    Args:
        name: Name of the machine.
        file: TOML file in the form of machines.toml. A table may take missing values from another machine: `base = "h200"`.

    Returns:
        The machine.

    Raises:
        MachineError: The name is unknown, or the file is no valid table of machines.
    """
    machines = known_machines()
    if file is not None:
        try:
            tree = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:  # unreadable, no TOML, or no UTF-8 text
            raise MachineError(
                f"{file}: {error}; give a TOML file with a table [{name}] as in megatron_rl/planner/machines.toml"
            ) from error
        machines |= _read_all(tree, str(file), machines)
    if name not in machines:
        raise MachineError(
            f"gpu type '{name}' is not known; known are {', '.join(machines)}; for another one give a file: --machines FILE"
        )
    return machines[name]


def _read_all(tree: dict[str, Any], where: str, known: dict[str, Machine]) -> dict[str, Machine]:
    """The machines of one file, in its order; the base of each is one of `known` or an earlier one of the file."""
    found: dict[str, Machine] = {}
    for name, table in tree.items():
        if not isinstance(table, dict):
            raise MachineError(f"{where}: {name} = {table!r} is not a table; write [{name}]")
        found[name] = _read_one(name, table, where, known | found)
    return found


def _read_one(name: str, table: dict[str, Any], where: str, known: dict[str, Machine]) -> Machine:
    values = dict(table)
    base = values.pop("base", None)
    names = {field.name: field for field in fields(Machine) if field.name != "name"}
    if base is not None and base not in known:
        raise MachineError(f"{where}: [{name}] base = {base!r} is not known; known are {', '.join(known)}")
    if strange := sorted(values.keys() - names.keys()):
        raise MachineError(f"{where}: [{name}] unknown {', '.join(strange)}; known are {', '.join(names)}")
    if wrong := [key for key, value in values.items() if key != "source" and not _is_amount(value)]:
        raise MachineError(f"{where}: [{name}] {', '.join(wrong)} must be a number, 0 or more")
    needed = {key for key, field in names.items() if field.default is MISSING}
    if base is None and (missing := sorted(needed - values.keys())):
        raise MachineError(f"{where}: [{name}] has no {', '.join(missing)}; add them, or a base that has them")
    return replace(known[base], name=name, **values) if base else Machine(name=name, **values)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def to_toml(machine: Machine) -> str:
    """The machine as TOML text that --machines reads."""
    values = {key: value for key, value in asdict(machine).items() if key != "name"}
    return tomli_w.dumps({machine.name: values})
