"""The trainer's side of the control messages: rank 0 asks the orchestrator what to do next and says what was done."""

import os
import time
from typing import TypeVar

import httpx

from megatron_rl.wire.access import key_from_environment, with_key
from megatron_rl.wire.control import (
    Ack,
    Order,
    OrderRequest,
    ProbeOrder,
    ProbeReport,
    ProbeRequest,
    Progress,
    SavedReport,
    StepReport,
    WeightsReport,
    decode,
    encode,
)  # fmt: skip

T = TypeVar("T")


class OrchestratorGone(RuntimeError):
    """The orchestrator has not answered for so long that the run is over."""


class Steering:
    """A blocking client of the orchestrator; only trainer rank 0 has one."""

    def __init__(self, url: str, key: str, patience_s: float = 60.0):
        self.url, self.key, self.patience_s = url, key, patience_s
        self._http = httpx.Client(base_url=url, headers=with_key(key), timeout=httpx.Timeout(60.0))

    def next_order(self, step: int) -> Order:
        """What comes after policy version `step`; 'wait' when there is nothing yet."""
        return self._post("/order", OrderRequest(step), Order)

    def probe_plan(self, version: int, timeout_s: float) -> str:
        """The plan file of the probe rollouts sampled at `version`, or '' when there were none in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            order = self._post("/probe", ProbeRequest(version, wait_s=min(20.0, timeout_s)), ProbeOrder)
            if order.ready:
                return order.plan_file
        return ""

    def report(self, message: StepReport | WeightsReport | ProbeReport | SavedReport | Progress) -> Ack:
        return self._post(_ROUTES[type(message)], message, Ack)

    def _post(self, route: str, message: object, answer: type[T]) -> T:
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                reply = self._http.post(route, content=encode(message))
                reply.raise_for_status()
                return decode(reply.content, answer)
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise OrchestratorGone(f"{self.url} has not answered for {self.patience_s:.0f} s ({error}); the trainer ends") from error
                time.sleep(0.5)


_ROUTES = {StepReport: "/step", WeightsReport: "/weights", ProbeReport: "/probed", SavedReport: "/saved", Progress: "/progress"}


def steering_from_environment() -> Steering:
    return Steering(os.environ["MEGATRON_RL_ORCHESTRATOR"], key_from_environment())
