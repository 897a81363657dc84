"""The trainer's client of the orchestrator: all ranks get the address of their store; rank 0 gets orders and reports results."""

import os
import time
from collections.abc import Callable

from megatron_rl.errors import RunError
from megatron_rl.wire.access import key_from_environment
from megatron_rl.wire.client import ControlClient, own_address
from megatron_rl.wire.control import (
    Ack,
    Order,
    OrderRequest,
    ProbeOrder,
    ProbeReport,
    ProbeRequest,
    Progress,
    Rendezvous,
    RendezvousRequest,
    SavedReport,
    StepReport,
    WeightsReport,
)


class RendezvousTimeoutError(RunError):
    """The trainer's rank 0 has not published the address of the ranks' store in time."""


class Steering:
    """A blocking client of the orchestrator. After the rendezvous only rank 0 uses it.

    Args:
        url: The orchestrator's.
        key: The run's.
        patience_s: How long requests to an orchestrator that does not answer are repeated.
    """

    def __init__(self, url: str, key: str, patience_s: float = 60.0) -> None:
        self.url, self.key = url, key
        self._client = ControlClient(url, key, patience_s=patience_s)

    def rendezvous(self, rank: int, serve: Callable[[str], int], timeout_s: float) -> tuple[str, int]:
        """Host and port of the ranks' store, which rank 0 serves.

        Args:
            rank: This process's.
            serve: Serves the store on a host and returns the port. Called on rank 0 alone, with this machine's address in the
                run: on a cluster the one that its agent found, else the one on the route to the orchestrator.
            timeout_s: How long rank 0 may take.

        Raises:
            RendezvousTimeoutError: It has taken longer.
            OrchestratorGoneError: The orchestrator does not answer.
        """
        own = ("", 0)
        if rank == 0:
            host = own_address(self.url)
            own = (host, serve(host))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self._client.send("/rendezvous", RendezvousRequest(rank, *own, wait_s=min(20.0, timeout_s)), Rendezvous)
            if found.port:
                return found.host, found.port
        raise RendezvousTimeoutError(
            f"rank 0 has not published the address of the ranks' store within {timeout_s:g} s (trainer.collective_timeout_s); "
            "see logs/trainer-0.log"
        )

    def next_order(self, step: int) -> Order:
        """The order that follows policy version `step`; 'wait' when there is none yet."""
        return self._client.send("/order", OrderRequest(step), Order)

    def probe_poll(self, version: int, timeout_s: float) -> Callable[[], str | None]:
        """A function that polls for the probe rollouts of a version, called until it returns something other than None.

        One call takes 20 s at most, since the other ranks wait in a collective meanwhile.

        Args:
            version: At which the rollouts are sampled.
            timeout_s: From now, after which there is no probe.

        Returns:
            The function: it returns the probe's plan file, '' where there was none in time, None where it is not ready.
        """
        deadline = time.monotonic() + timeout_s

        def poll() -> str | None:
            order = self._client.send("/probe", ProbeRequest(version, wait_s=min(20.0, timeout_s)), ProbeOrder)
            return order.plan_file if order.ready or time.monotonic() >= deadline else None

        return poll

    def report(self, message: StepReport | WeightsReport | ProbeReport | SavedReport | Progress) -> Ack:
        """Send a report; the answer tells whether the run shall stop."""
        return self._client.send(_ROUTES[type(message)], message, Ack)


_ROUTES = {StepReport: "/step", WeightsReport: "/weights", ProbeReport: "/probed", SavedReport: "/saved", Progress: "/progress"}


def steering_from_environment() -> Steering:
    """The client of the orchestrator that started this process."""
    return Steering(os.environ["MEGATRON_RL_ORCHESTRATOR"], key_from_environment())
