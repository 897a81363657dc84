"""What a machine can do: peaks from its data sheet, and the shares of them that programs reach.

All of it stands in machines.toml.
"""

import tomllib
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from megatron_rl.errors import UserError


class MachineError(UserError, ValueError):
    """A machine that is not known, or whose table is incomplete."""


@dataclass(frozen=True)
class Machine:
    """One accelerator and its surroundings. Bandwidths in GB/s (1e9 bytes) in one direction, for one accelerator."""

    name: str
    memory_gib: float
    bf16_tflops: float
    """Dense, without sparsity; as the other two."""
    fp8_tflops: float
    fp4_tflops: float
    hbm_gb_s: float
    nvlink_gb_s: float
    network_gb_s: float
    nvlink_domain: int
    """Accelerators that reach one another over NVLink."""
    host_memory_gib: float
    """Of one accelerator's share of a node."""
    matmul_efficiency: float
    """Of the peak, by the dense linear maps of a large model."""
    expert_efficiency: float
    """Of the peak, by grouped products with many rows for each expert."""
    expert_half_rows: float
    """Rows for each expert at which a grouped product reaches half of its efficiency."""
    attention_efficiency: float
    memory_efficiency: float
    """Of HBM's bandwidth, by everything else."""
    link_efficiency: float
    """Of NVLink's and the network's, by collectives."""
    layer_overhead_us: float
    """Of one layer's forward pass: starting kernels, and waiting for them where their sizes are not known before."""
    step_overhead_s: float
    latency_us: float
    """Of one collective inside a node; three times as much across nodes."""
    decode_efficiency: float
    """Of HBM's bandwidth, by a server's decoding."""
    decode_overhead_ms: float
    """Of one decoding step, beyond reading weights and caches."""
    reserved_gib: float
    """Of the driver, of communicators' buffers and of libraries' workspaces on every accelerator."""
    fragmentation: float
    """Share of activations and workspace that the allocator holds beyond what is in use."""
    activation_factor: float = 1.0
    """Of what activations.py counts; above 1 where layers are made of unfused operations."""
    error_low: float = 0.7
    error_high: float = 1.4
    """Published or measured step times lie between these multiples of the predicted one."""
    cores: float = 0.0
    """CPU cores of a machine whose ranks share them (two threads of one core are less than two); 0: each rank has an accelerator
    of its own."""
    source: str = ""

    def tflops(self, precision: str) -> float:
        """Peak of dense products in bf16, fp8 or nvfp4; of bf16 for any other precision."""
        return {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops, "nvfp4": self.fp4_tflops}.get(precision, self.bf16_tflops)


def known_machines() -> dict[str, Machine]:
    """The machines of machines.toml by name."""
    text = files("megatron_rl.planner").joinpath("machines.toml").read_text()
    return _read_all(tomllib.loads(text), "machines.toml", {})


def machine_named(name: str, file: Path | None = None) -> Machine:
    """From the built-in table, or from a file of the same form, which may name what it starts from: `base = "h200"`."""
    machines = known_machines()
    if file is not None:
        try:
            tree = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:  # no TOML, or no text at all
            raise MachineError(
                f"{file}: {error}; give a TOML file with a table [{name}] as in megatron_rl/planner/machines.toml"
            ) from error
        machines |= _read_all(tree, str(file), machines)
    if name not in machines:
        raise MachineError(
            f"gpu type '{name}' is not known; known are {', '.join(machines)}; others come from a file: --machines FILE"
        )
    return machines[name]


def _read_all(tree: dict[str, Any], where: str, known: dict[str, Machine]) -> dict[str, Machine]:
    """The machines of one file, in its order; each may start from one of `known` or from one before it."""
    found: dict[str, Machine] = {}
    for name, table in tree.items():
        if not isinstance(table, dict):
            raise MachineError(f"{where}: {name} = {table!r} is outside of a table; write [{name}]")
        found[name] = _read_one(name, table, where, known | found)
    return found


def _read_one(name: str, table: dict[str, Any], where: str, known: dict[str, Machine]) -> Machine:
    values = dict(table)
    base = values.pop("base", None)
    names = {field.name: field for field in fields(Machine) if field.name != "name"}
    if base is not None and base not in known:
        raise MachineError(f"{where}: [{name}] base = {base!r} is not known; known are {', '.join(known)}")
    if strange := sorted(values.keys() - names.keys()):
        raise MachineError(f"{where}: [{name}] {', '.join(strange)}: not known; known are {', '.join(names)}")
    if wrong := [key for key, value in values.items() if key != "source" and not _is_amount(value)]:
        raise MachineError(f"{where}: [{name}] {', '.join(wrong)}: has to be a number, 0 or more")
    needed = {key for key, field in names.items() if field.default is MISSING}
    if base is None and (missing := sorted(needed - values.keys())):
        raise MachineError(f"{where}: [{name}] has no {', '.join(missing)}; add them, or a base that has them")
    return replace(known[base], name=name, **values) if base else Machine(name=name, **values)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def to_toml(machine: Machine) -> str:
    """The machine as a table that --machines takes."""
    values = {key: value for key, value in asdict(machine).items() if key != "name"}
    return tomli_w.dumps({machine.name: values})
