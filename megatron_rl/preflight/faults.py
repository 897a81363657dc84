"""Faults that are injected on purpose, to see that a check notices them.

Each wraps a function of the program for the length of a block.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_rl.batching import collate as batching
from megatron_rl.config import ConfigError
from megatron_rl.weight_mapping import ParameterTable, param_mappings


@contextmanager
def injected_fault(name: str | None) -> Iterator[None]:
    """Injects a fault into this process for the length of the block.

    Args:
        name: One of `FAULTS`; None injects nothing.
    """
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield


@contextmanager
def swapped_gate_up() -> Iterator[None]:
    """Loads the weights of gate and up into Megatron in exchanged places."""
    with (
        _wrapped(param_mappings.GateUpMapping, "fuse", lambda fuse: lambda self, parts: fuse(self, list(parts)[::-1])),
        _wrapped(param_mappings.GateUpMapping, "row_pieces", lambda pieces: lambda self, tensors: pieces(self, tensors)[::-1]),
    ):
        yield


@contextmanager
def shifted_routes() -> Iterator[None]:
    """Sends each token of a sequence to the experts of the token before it."""

    def shifting(write: Callable[..., None]) -> Callable[..., None]:
        def write_shifted(columns: dict[str, Any], member: Any, start: int) -> None:
            write(columns, member, start)
            if "routed_experts" in columns:
                rows = columns["routed_experts"][start : start + member.rollout.num_tokens - 1]
                rows[1:] = rows[:-1].copy()

        return write_shifted

    with _wrapped(batching, "_write_sequence", shifting):
        yield


@contextmanager
def one_sided_temperature() -> Iterator[None]:
    """Scores at temperature 1 in the trainer what was sampled at another temperature."""

    def forgetting(write: Callable[..., slice]) -> Callable[..., slice]:
        def write_without_temperature(columns: dict[str, Any], member: Any, start: int, step: int) -> slice:
            targets = write(columns, member, start, step)
            columns["temperature"][targets] = 1.0
            return targets

        return write_without_temperature

    with _wrapped(batching, "_write_targets", forgetting):
        yield


@contextmanager
def unreduced_expert_grad() -> Iterator[None]:
    """Leaves out the reduction of the experts' gradients over ranks: each rank keeps those of its own tokens."""
    # Imported here: it loads Megatron, for which the stand-in for CUDA has to be in place.
    from megatron_rl.engine import engine

    def unreduced(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wrap_without_reduction(chunks: Any) -> Any:
            models = wrap(chunks)
            for group in (group for model in models for group in model.expert_parallel_bucket_groups):
                group.start_grad_sync = group.finish_grad_sync = lambda *_, **__: None
            return models

        return wrap_without_reduction

    with _wrapped(engine, "wrap_for_training", unreduced):
        yield


FAULTS = {
    "swapped-gate-up": swapped_gate_up,
    "shifted-routes": shifted_routes,
    "one-sided-temperature": one_sided_temperature,
    "unreduced-expert-grad": unreduced_expert_grad,
}
"""By the name that `--inject-fault` takes."""
FAULTS_OF_EXPERTS = ("shifted-routes", "unreduced-expert-grad")
"""Faults that a dense model cannot have."""
FAULTS_OF_CONSTRUCTION = ("unreduced-expert-grad",)
"""Faults that an engine has from its construction on; they change gradients, but no log-prob."""


def check_fault_applies(name: str | None, hf_config: Mapping[str, Any]) -> None:
    """Refuses a fault that does not exist or that the model cannot have.

    Args:
        name: What `--inject-fault` was given; None passes.
        hf_config: config.json of the model.

    Raises:
        ConfigError: The message lists the faults that can be injected.
    """
    if name is None:
        return
    if name not in FAULTS:
        raise ConfigError(f"--inject-fault {name}: there is no such fault; use one of {', '.join(FAULTS)}")
    if name in FAULTS_OF_EXPERTS and ParameterTable(hf_config).architecture.moe is None:
        others = [fault for fault in FAULTS if fault not in FAULTS_OF_EXPERTS]
        raise ConfigError(f"--inject-fault {name}: the model has no experts; use one of {', '.join(others)}")


@contextmanager
def _wrapped(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
