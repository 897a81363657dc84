"""The control messages between orchestrator, rollout workers and trainer rank 0, as JSON over HTTP.

The orchestrator serves; workers and trainer are its clients:

    worker   POST /work      WorkRequest   -> WorkOrder      waits (at most its `wait_s`) until there is a group to sample
    worker   POST /groups    GroupReport   -> Ack
    a rank   POST /rendezvous RendezvousRequest  -> Rendezvous       where the ranks of the trainer find one another
    trainer  POST /order     OrderRequest  -> Order          waits until a step plan is ready, or there is something else to do
    trainer  POST /step      StepReport    -> Ack            an optimizer step is done
    trainer  POST /weights   WeightsReport -> Ack            version v is on the servers named; the others are out of the fleet
    trainer  POST /probe     ProbeRequest  -> ProbeOrder     probe rollouts sampled after the last update
    trainer  POST /probed    ProbeReport   -> Ack            how far the trainer's scores of the probe are from the servers'
    trainer  POST /saved     SavedReport   -> Ack            a checkpoint lies in the folder named
    trainer  POST /progress  Progress      -> Ack            how far a phase without orders has come (the supervised start, the export)
    anyone   GET  /status                  -> Status

Every request carries the run's key (`wire.access`).
"""

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from megatron_rl.records import GroupResult, GroupTask


@dataclass(frozen=True)
class Ack:
    """Received. stop: leave as soon as nothing is lost by it."""

    stop: bool = False


@dataclass(frozen=True)
class WorkRequest:
    worker: str
    slots: int
    """Groups that the worker can begin now."""
    wait_s: float = 20.0
    host: str = ""
    """The worker's machine, by the address from which it reaches the orchestrator."""


@dataclass(frozen=True)
class WorkOrder:
    tasks: tuple[GroupTask, ...] = ()
    stop: bool = False


@dataclass(frozen=True)
class GroupReport:
    worker: str
    result: GroupResult


@dataclass(frozen=True)
class RendezvousRequest:
    """Of every rank at its start. host, port: where rank 0 serves the ranks' store; from the others '' and 0."""

    rank: int
    host: str = ""
    port: int = 0
    wait_s: float = 20.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks' store is; port 0: rank 0 has not come yet, ask again."""

    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class OrderRequest:
    step: int
    """The step that the trainer is ready to do, which is also the policy version that it holds."""
    wait_s: float = 20.0


@dataclass(frozen=True)
class Order:
    """What the trainer does next.

    train: run the step of `plan_file`. sync: bring `servers` to the trainer's version. save: write a checkpoint, then ask again.
    stop: leave (after a checkpoint where `save` came first). wait: nothing yet, ask again.
    """

    kind: Literal["train", "sync", "save", "stop", "wait"]
    plan_file: str = ""
    servers: tuple[str, ...] = ()
    """Servers that are up; with `sync` those that have to be brought to the current version."""


@dataclass(frozen=True)
class StepReport:
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class WeightsReport:
    version: int
    servers: tuple[str, ...]
    """Hold the version, verified."""
    failed: dict[str, str] = field(default_factory=dict)
    """Server to reason: they may hold anything, and have to be restarted."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeRequest:
    version: int
    wait_s: float = 20.0


@dataclass(frozen=True)
class ProbeOrder:
    """A plan of the probe rollouts of a version (its advantages mean nothing); not ready: ask again."""

    ready: bool
    plan_file: str = ""


@dataclass(frozen=True)
class ProbeReport:
    version: int
    abs_dlogp: dict[str, float]
    """Rollout uid to its mean |log p_trainer - log p_rollout|, with every replay on."""


@dataclass(frozen=True)
class SavedReport:
    step: int
    folder: str


@dataclass(frozen=True)
class Progress:
    phase: str
    done: int
    total: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    step: int
    version: int
    servers: dict[str, str]
    message: str = ""


T = TypeVar("T")
_ADAPTERS: dict[type, TypeAdapter] = {}


def encode(message: object) -> bytes:
    """A message as JSON. A number that is NaN or infinite stays one, in JavaScript's spelling: a diverged loss has to be reportable."""
    return to_json(message)


def decode(data: bytes, kind: type[T]) -> T:
    """JSON to a message of the kind named; pydantic's ValidationError names what does not fit."""
    return _adapter(kind).validate_json(data)


def _adapter(kind: type) -> TypeAdapter:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
