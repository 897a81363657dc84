"""The trainer's side of the control messages: all ranks ask where they meet; rank 0 asks what to do next and says what was done."""

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


class RendezvousTimeoutError(RunError, RuntimeError):
    """The trainer's first rank has not come."""


class Steering:
    """A blocking client of the orchestrator. Of the ranks only the first goes on to use it after they have met."""

    def __init__(self, url: str, key: str, patience_s: float = 60.0) -> None:
        self.url, self.key = url, key
        self._client = ControlClient(url, key, patience_s=patience_s)

    def rendezvous(self, rank: int, serve: Callable[[str], int], timeout_s: float) -> tuple[str, int]:
        """Host and port of the ranks' store. serve: called on rank 0 with this machine's address in the run (on a cluster the one that
        its agent found, else that on the way to the orchestrator); it serves the store there and returns the port.
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
        raise RendezvousTimeoutError(f"rank 0 has not said within {timeout_s:g} s where the ranks meet; see logs/trainer-0.log")

    def next_order(self, step: int) -> Order:
        """What comes after policy version `step`; 'wait' when there is nothing yet."""
        return self._client.send("/order", OrderRequest(step), Order)

    def probe_question(self, version: int, timeout_s: float) -> Callable[[], str | None]:
        """To be asked until it answers with the plan file of the probe rollouts sampled at `version`, '' when there were none in time.
        One answer takes 20 s at most; the other ranks wait in a collective meanwhile.
        """
        deadline = time.monotonic() + timeout_s

        def ask() -> str | None:
            order = self._client.send("/probe", ProbeRequest(version, wait_s=min(20.0, timeout_s)), ProbeOrder)
            return order.plan_file if order.ready or time.monotonic() >= deadline else None

        return ask

    def report(self, message: StepReport | WeightsReport | ProbeReport | SavedReport | Progress) -> Ack:
        return self._client.send(_ROUTES[type(message)], message, Ack)


_ROUTES = {StepReport: "/step", WeightsReport: "/weights", ProbeReport: "/probed", SavedReport: "/saved", Progress: "/progress"}


def steering_from_environment() -> Steering:
    return Steering(os.environ["MEGATRON_RL_ORCHESTRATOR"], key_from_environment())
