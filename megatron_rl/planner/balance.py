"""Divides the accelerators between trainer and servers, so that neither waits long for the other."""

from dataclasses import dataclass

from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.rollouts import ServerPlan, best_server, sync_seconds
from megatron_rl.planner.search import Scored, Searched, search
from megatron_rl.planner.workload import Workload


@dataclass(frozen=True)
class ParallelismPlan:
    """A plan of a run: the trainer's layout, the servers, and the seconds that each needs for a step."""

    trainer: Scored
    server: ServerPlan
    servers: int
    """Number of servers."""
    server_nodes: int
    """Nodes that each server spans."""
    sync_s: float
    """Seconds of a weight update."""
    rollouts_s: float
    """Seconds in which the servers sample the tokens of one step."""
    overlapped: bool
    """Whether trainer and servers work at the same time."""

    @property
    def trainer_s(self) -> float:
        """Seconds of the trainer in one step, including the weight update of the servers."""
        return self.trainer.seconds + self.sync_s

    @property
    def step_s(self) -> float:
        """Seconds of a step: the longer of both sides if they overlap, else their sum."""
        return max(self.trainer_s, self.rollouts_s) if self.overlapped else self.trainer_s + self.rollouts_s

    @property
    def waits(self) -> str:
        """Which side waits, and for which fraction of a step."""
        if not self.overlapped:
            return "each for the other: max_staleness = 0"
        gap = abs(self.trainer_s - self.rollouts_s) / self.step_s
        return f"{'servers' if self.trainer_s > self.rollouts_s else 'trainer'} {gap:.0%} of a step"


@dataclass(frozen=True)
class Balanced:
    """Result of the search over divisions and layouts."""

    plans: list[ParallelismPlan]
    """The fastest first. If it is empty, nothing fits, and `searched` and `server` say which side."""
    num_evaluated: int
    searched: Searched | None
    """The trainer's search that came nearest to fitting."""
    server: ServerPlan | None
    """A server that fits; None if none does."""


def balance(
    counts: ParameterCounts,
    work: Workload,
    machine: Machine,
    gpus: int,
    node: int,
    *,
    trainer_gpus: int | None = None,
    keep: int = 5,
) -> Balanced:
    """Searches the divisions of the accelerators into trainer and servers, and the layouts of each.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        gpus: Number of accelerators.
        node: Accelerators of one node.
        trainer_gpus: Number of trainer ranks, if it is fixed.
        keep: How many plans to return.

    Returns:
        The fastest plans.
    """
    plans: list[ParallelismPlan] = []
    num_evaluated, nearest, server = 0, None, None
    sync = sync_seconds(counts, work, machine)
    for trainer in [trainer_gpus] if trainer_gpus else trainer_sizes(gpus, node):
        found = best_server(counts, work, machine, gpus - trainer)
        server = found or server
        servers = (gpus - trainer) // found.tensor if found else 0
        rollouts_s = work.num_sequences * work.mean_response / (servers * found.tokens_per_s) if found else 0.0
        if len(plans) >= keep and rollouts_s > plans[keep - 1].step_s:
            continue  # too few servers are left, whatever the trainer does
        searched = search(counts, work, machine, trainer, node, keep=keep)
        num_evaluated += searched.num_evaluated
        nearest = (
            searched
            if nearest is None or (not nearest.best and _missing_bytes(searched) < _missing_bytes(nearest)) or searched.best
            else nearest
        )
        if found is not None:
            plans += [
                ParallelismPlan(
                    scored, found, servers, nodes_of_server(found.tensor, node), sync, rollouts_s, work.max_staleness > 0
                )
                for scored in searched.best
            ]
            plans.sort(key=lambda plan: (plan.step_s, plan.trainer.seconds))
    return Balanced(plans[:keep], num_evaluated, nearest, server)


def nodes_of_server(tensor: int, node: int) -> int:
    """The fewest nodes of `node` accelerators that hold equal parts of a server with `tensor` of them."""
    return next(nodes for nodes in range(1, tensor + 1) if tensor % nodes == 0 and tensor // nodes <= node)


def _missing_bytes(searched: Searched) -> float:
    return searched.nearest[1].total if searched.nearest else float("inf")


def trainer_sizes(gpus: int, node: int) -> list[int]:
    """Numbers of trainer ranks to try.

    With several nodes these are 2^a and 3 x 2^a full nodes, because such numbers have many divisors; with one node, parts of it.

    Args:
        gpus: Number of accelerators.
        node: Accelerators of one node.

    Returns:
        Numbers below `gpus`, ascending.
    """
    if gpus <= node:
        return [n for n in (1, 2, 4, 6, 8) if n < gpus]
    nodes = gpus // node
    numbers = {factor * 2**power for factor in (1, 3) for power in range(nodes.bit_length())}
    return [number * node for number in sorted(numbers) if number < nodes]
