"""Faults planted on purpose: each wraps a function of the program from outside, for the length of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl.batching import collate as batching
from megatron_rl.weight_mapping import param_mappings


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """In this process, within the block; None: nothing is planted."""
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield


@contextmanager
def swapped_gate_up() -> Iterator[None]:
    """Weights come into Megatron with gate and up in each other's place."""
    with (
        _wrapped(param_mappings.GateUpMapping, "fuse", lambda fuse: lambda self, parts: fuse(self, list(parts)[::-1])),
        _wrapped(param_mappings.GateUpMapping, "row_pieces", lambda pieces: lambda self, tensors: pieces(self, tensors)[::-1]),
    ):
        yield


@contextmanager
def shifted_routes() -> Iterator[None]:
    """Each token of a sequence is sent to the experts of the token before it."""

    def shifting(write: Callable[..., None]) -> Callable[..., None]:
        def write_shifted(columns: dict[str, Any], member: Any, start: int) -> None:
            write(columns, member, start)
            if columns["routed_experts"] is not None:
                rows = columns["routed_experts"][start : start + member.rollout.num_tokens - 1]
                rows[1:] = rows[:-1].copy()

        return write_shifted

    with _wrapped(batching, "_write_sequence", shifting):
        yield


@contextmanager
def one_sided_temperature() -> Iterator[None]:
    """The trainer scores at temperature 1 what was sampled at another one."""

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
    """The gradients of experts stay those of each rank's own tokens."""
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
    "swapped-gate-up": swapped_gate_up, "shifted-routes": shifted_routes, "one-sided-temperature": one_sided_temperature,
    "unreduced-expert-grad": unreduced_expert_grad,
}  # fmt: skip
NEED_EXPERTS = ("shifted-routes", "unreduced-expert-grad")
TRAINING = ("unreduced-expert-grad",)
"""Faults that lie in an engine from its construction on, and change no score."""


@contextmanager
def _wrapped(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrapper(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
