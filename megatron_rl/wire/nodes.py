"""The messages between the orchestrator and the agents of a cluster's nodes, one agent a node.

    agent   POST /node         NodeRequest  -> NodeOrders    joins with the first one; waits (at most `wait_s`) for further orders
    agent   POST /node/ended   ProcessEnded -> Ack           a process that the agent started has exited

Orders of a node are numbered by their place in its list. An agent reports how many it has carried out and gets those that follow.
So an answer that is lost on its way is given again, and no order is carried out twice.
"""

import os
from dataclasses import dataclass, field

from megatron_rl.errors import UserError

ROLES = ("trainer", "rollouts")

ADDRESS_VARIABLE = "MEGATRON_RL_ADDRESS"
"""Environment variable of every process that an agent starts: the address at which other nodes reach its node."""


class JobEnvironmentError(UserError):
    """A step of a job that lacks what the batch script exports."""


def job_attempt() -> str:
    """Which attempt of which job this process belongs to, such as '4711.0': the batch script exports it, a requeue adds one."""
    # A job that was submitted by version 0.1 and is requeued has the second name in its script.
    return (
        os.environ.get("MEGATRON_RL_ATTEMPT") or os.environ.get("MEGATRON_RL_LIFE") or variable_of_the_job("MEGATRON_RL_ATTEMPT")
    )


def variable_of_the_job(name: str) -> str:
    """The value of a variable that the batch script and Slurm give every step of the job.

    Raises:
        JobEnvironmentError: It is not set.
    """
    try:
        return os.environ[name]
    except KeyError:
        raise JobEnvironmentError(
            f"{name} is not set: the job's script exports it, and starts this program by `srun --export=ALL`; look for what "
            "removes it: a prologue (slurm.prologue), a container's options, or a TaskProlog of the site"
        ) from None


@dataclass(frozen=True)
class OrchestratorPlace:
    """RUN/orchestrator.json: where the agents find the orchestrator."""

    attempt: str
    """Attempt of the job, see job_attempt(); the file of an earlier attempt is stale."""
    host: str
    url: str


@dataclass(frozen=True)
class NodeRequest:
    """An agent joins, or asks for further orders."""

    role: str
    """One of ROLES."""
    index: int
    """Number of the node among those of its role."""
    host: str
    address: str
    """Address at which the other nodes of the run reach this one."""
    devices: tuple[str, ...]
    """What CUDA_VISIBLE_DEVICES may name on this node."""
    free_ports: tuple[int, ...]
    """Ports of `address` that are free now."""
    num_done: int
    """Orders carried out."""
    wait_s: float = 10.0


@dataclass(frozen=True)
class StartOrder:
    """Start a process."""

    process: str
    """The orchestrator's name for the process; a new one at each start."""
    name: str
    argv: tuple[str, ...]
    log_file: str
    stop_signal: int
    """Signal that stops the process, as in `processes.Command`."""
    env: dict[str, str] = field(default_factory=dict, repr=False)  # holds the run's key


@dataclass(frozen=True)
class StopOrder:
    """Stop a process."""

    process: str
    kill: bool
    """True: at once, with all that it started. False: it is asked to end."""


@dataclass(frozen=True)
class NodeOrders:
    """What an agent does next."""

    orders: tuple[StartOrder | StopOrder, ...] = ()
    """Further orders, in the order in which they were given; they follow `num_done` earlier ones."""
    leave: bool = False
    """The run is over."""


@dataclass(frozen=True)
class ProcessEnded:
    """A process of a node has exited."""

    process: str
    status: int
    """Exit status as subprocess reports it: negative for a signal."""
