"""The whole diagnosis: facts of the machine, and for a configuration who computes where and what stands in the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.launch.builds import Builds, check_builds, installed_builds
from megatron_rl.launch.doctor.facts import Fact, fp4_fact, fused_facts, gpu_facts, machine_facts, software_facts
from megatron_rl.orchestrator import gpus_of_run, local_plan
from megatron_rl.processes import Assignment
from megatron_rl.processes.gpus import Gpu, GpuQueryError, Runner, query_gpus, run_program, usable_of


@dataclass(frozen=True)
class Diagnosis:
    """What `megatron-rl doctor` shows."""

    facts: tuple[Fact, ...]
    device: str | None = None
    """Where the configuration computes; None: no configuration was given."""
    assignments: tuple[Assignment, ...] = ()
    """Which GPUs each process of the configuration gets; empty where it cannot run here."""
    obstacles: tuple[str, ...] = field(default=())
    """What keeps the configuration from running on this machine, each with its remedy."""

    @property
    def can_run(self) -> bool:
        """Whether nothing was found that keeps the configuration from running here."""
        return not self.obstacles

    def lines(self) -> list[str]:
        """For a terminal."""
        width = max(len(fact.name) for fact in self.facts)
        lines = [f"{fact.name:<{width}}  {fact.text}" for fact in self.facts]
        if self.device is not None:
            lines += ["", f"the configuration computes on: {self.device}"]
            lines += [f"  {a.process}: {'GPU ' + ','.join(a.devices) if a.devices else 'no GPU'}" for a in self.assignments]
            lines += [f"cannot run here: {obstacle}" for obstacle in self.obstacles] or ["nothing keeps it from running here"]
        return lines

    def as_json(self) -> dict[str, Any]:
        """Plain values: facts by name, processes by name."""
        facts = {fact.name: {"value": fact.value, "reason": fact.reason} for fact in self.facts}
        if self.device is None:
            return {"facts": facts}
        devices = {a.process: list(a.devices) for a in self.assignments}
        return {"facts": facts, "device": self.device, "devices": devices, "obstacles": list(self.obstacles)}


def diagnose(config: Config | None, run: Runner = run_program, builds: Builds | None = None) -> Diagnosis:
    """Look at this machine and, with a configuration, at what keeps `megatron-rl train` from running it here.

    Args:
        config: The configuration; None: the machine alone.
        run: Runs nvidia-smi.
        builds: What is installed; None: look.
    """
    builds = builds or installed_builds()
    gpus, reason = _gpus(run)
    facts = [*software_facts(builds), *machine_facts(run), *gpu_facts(gpus, reason), fp4_fact(gpus)]
    device = config.device if config else ("cuda" if gpus else "cpu")
    facts += fused_facts(device)
    if config is None:
        return Diagnosis(tuple(facts))
    obstacles = [*_build_obstacles(config, builds), *_gpu_obstacles(config, gpus, reason)]
    assignments: tuple[Assignment, ...] = ()
    try:
        assignments = local_plan(config, () if device == "cpu" else usable_of(gpus)).assignments
    except UserError as error:
        if gpus or not obstacles:
            obstacles += str(error).splitlines()
    return Diagnosis(tuple(facts), device, assignments, tuple(obstacles))


def _gpus(run: Runner) -> tuple[tuple[Gpu, ...], str]:
    """All GPUs; or none, and why."""
    try:
        return query_gpus(run), ""
    except GpuQueryError as error:
        return (), str(error)


def _build_obstacles(config: Config, builds: Builds) -> list[str]:
    try:
        check_builds(config, builds)
    except UserError as error:
        return [str(error)]
    return []


def _gpu_obstacles(config: Config, gpus: Sequence[Gpu], reason: str) -> list[str]:
    if config.device == "cpu":
        return []
    if not gpus:
        why = reason or "nvidia-smi lists none"
        remedy = "use a machine with GPUs, `megatron-rl launch` (--dry-run shows its nodes and GPUs), or run.device = 'cpu'"
        return [f"run.device is cuda, and no GPU was found, where the run needs {gpus_of_run(config)}: {why}; {remedy}"]
    if config.precision.training == "native" and not all(gpu.has_fp4 for gpu in gpus):
        return [f"precision.training = 'native': {fp4_fact(tuple(gpus)).reason}; use 'qat', with precision.activations = 'full'"]
    return []
