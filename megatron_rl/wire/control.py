"""The control messages between orchestrator, rollout workers and trainer rank 0, as JSON over HTTP.

The orchestrator serves; workers and trainer are its clients:

    worker   POST /work        WorkRequest        -> WorkOrder   waits (at most `wait_s`) until there is a group to sample
    worker   POST /groups      GroupReport        -> Ack         a group is sampled, or has failed
    a rank   POST /rendezvous  RendezvousRequest  -> Rendezvous  where the trainer's ranks find one another
    trainer  POST /order       OrderRequest       -> Order       waits until there is a step plan, or something else to do
    trainer  POST /step        StepReport         -> Ack         an optimizer step is done
    trainer  POST /weights     WeightsReport      -> Ack         which servers hold version v; the others leave the fleet
    trainer  POST /probe       ProbeRequest       -> ProbeOrder  probe rollouts that were sampled after the last update
    trainer  POST /probed      ProbeReport        -> Ack         how far the trainer's scores of the probe are from the servers'
    trainer  POST /saved       SavedReport        -> Ack         the trainer's part of a checkpoint is in the folder named
    trainer  POST /progress    Progress           -> Ack         progress of a phase without orders (supervised start, export)
    anyone   GET  /status                         -> Status

"trainer" is its rank 0. Every request carries the run's key (`wire.access`). `wire.client` has the clients.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from megatron_rl.records import GroupResult, GroupTask


@dataclass(frozen=True)
class Ack:
    """The message was received."""

    stop: bool = False
    """End as soon as nothing is lost by it."""


@dataclass(frozen=True)
class WorkRequest:
    """A worker asks for groups to sample."""

    worker: str
    slots: int
    """Groups that the worker can start now."""
    wait_s: float = 20.0
    host: str = ""
    """The worker's machine, by the address from which it reaches the orchestrator."""


@dataclass(frozen=True)
class WorkOrder:
    """What a worker samples next; without tasks it asks again."""

    tasks: tuple[GroupTask, ...] = ()
    stop: bool = False
    """The worker ends; it cancels what it has in flight."""


@dataclass(frozen=True)
class GroupReport:
    """What became of one group."""

    worker: str
    result: GroupResult


@dataclass(frozen=True)
class RendezvousRequest:
    """Sent by every rank when it starts."""

    rank: int
    host: str = ""
    """Host of the store that rank 0 serves, with `port`; other ranks send neither."""
    port: int = 0
    wait_s: float = 20.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks' store is."""

    host: str = ""
    port: int = 0
    """0: rank 0 has not reported its store yet; ask again."""


@dataclass(frozen=True)
class OrderRequest:
    """The trainer asks what to do next."""

    step: int
    """The next step of the trainer, which is also the policy version that it holds."""
    wait_s: float = 20.0


@dataclass(frozen=True)
class Order:
    """What the trainer does next.

    Example: `Order("train", plan_file="plans/step_000003.json")`.
    """

    kind: Literal["train", "sync", "save", "stop", "wait"]
    """train: run the step of `plan_file`. sync: update `servers` to the trainer's version. save: write a checkpoint, then ask
    again. stop: end (a checkpoint was ordered before, where one is wanted). wait: nothing yet, ask again."""
    plan_file: str = ""
    """Path of the step plan, relative to the spool."""
    servers: tuple[str, ...] = ()
    """Servers that are up; with `sync` those that do not hold the current version."""


@dataclass(frozen=True)
class StepReport:
    """An optimizer step is done."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class WeightsReport:
    """A weight update has ended."""

    version: int
    servers: tuple[str, ...]
    """URLs of those that hold the version, verified."""
    failed: dict[str, str] = field(default_factory=dict)
    """Server's URL to reason. These may hold any weights and have to be restarted."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeRequest:
    """The trainer asks for rollouts that the servers sampled at `version`."""

    version: int
    wait_s: float = 20.0


@dataclass(frozen=True)
class ProbeOrder:
    """A plan of the probe rollouts of a version; its advantages mean nothing."""

    ready: bool
    """False: ask again."""
    plan_file: str = ""
    """Empty when there is nothing to score."""


@dataclass(frozen=True)
class ProbeReport:
    """The trainer has scored the probe rollouts of `version`."""

    version: int
    abs_dlogp: dict[str, float]
    """Rollout uid to its mean |log p_trainer - log p_rollout|, with every replay on."""


@dataclass(frozen=True)
class SavedReport:
    """The trainer's part of the checkpoint at `step` is written."""

    step: int
    folder: str
    """The checkpoint's temporary name; the orchestrator adds its part and renames it."""


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of a phase, such as `Progress("export", 3, 10)`."""

    phase: str
    done: int
    total: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """What `megatron-rl status` shows of a run."""

    step: int
    version: int
    servers: dict[str, str]
    message: str = ""


T = TypeVar("T")
_ADAPTERS: dict[type, TypeAdapter] = {}


def encode(message: object) -> bytes:
    """A message as JSON. NaN and infinity are kept, in JavaScript's spelling: a diverged loss has to be reportable."""
    return to_json(message)


def decode(data: bytes, kind: type[T]) -> T:
    """JSON to a message of type `kind`.

    Raises:
        pydantic.ValidationError: It names every field that does not fit.
    """
    return _adapter(kind).validate_json(data)


def _adapter(kind: type) -> TypeAdapter:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
