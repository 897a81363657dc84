"""Requests of the user to a run, as files in RUN/requests, which only the user can read: the run's key stays inside the run.

    requests/ask_0123456789ab.json       written by the command line
    requests/answer_0123456789ab.json    written by the orchestrator once it is done; the command line removes both

So they work from every machine that sees the run's folder, such as a login node.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config import RunFolder
from megatron_rl.errors import UserError
from megatron_rl.orchestrator.fleet import Fleet, FleetError
from megatron_rl.records import write_atomically
from megatron_rl.wire.control import decode, encode

POLL_S = 0.5


class RequestError(UserError, ValueError):
    """A request that the run refused or did not answer."""


@dataclass(frozen=True)
class ServersRequest:
    """add: `count` servers. remove: those of `which`, each a slot's number or a URL."""

    action: Literal["add", "remove"]
    count: int = 0
    which: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """done: whether the request was carried out. text: what was done, or why not."""

    done: bool
    text: str


def ask(folder: RunFolder, request: ServersRequest, timeout_s: float = 30.0) -> str:
    """Send a request to a run and wait for its answer.

    Args:
        folder: Of the run.
        request: What it shall do.
        timeout_s: How long the answer may take.

    Returns:
        What the run has done, for a person.

    Raises:
        RequestError: The run refused, or did not answer in time.
    """
    name = secrets.token_hex(6)
    asked, answered = folder.requests / f"ask_{name}.json", folder.requests / f"answer_{name}.json"
    write_atomically(asked, encode(request))
    try:
        deadline = time.monotonic() + timeout_s
        while not answered.exists():
            if time.monotonic() > deadline:
                raise RequestError(
                    f"{folder.path} has not answered within {timeout_s:g} s: `megatron-rl status {folder.path}` shows "
                    "whether it runs"
                )
            time.sleep(0.1)
        answer = decode(answered.read_bytes(), Answer)
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if not answer.done:
        raise RequestError(answer.text)
    return answer.text


class Requests:
    """The orchestrator's side. Requests from before the run was restarted are deleted, not carried out."""

    def __init__(self, folder: RunFolder, fleet: Fleet) -> None:
        self._folder, self._fleet = folder, fleet
        for left in folder.requests.glob("*.json"):
            left.unlink(missing_ok=True)

    async def follow(self) -> None:
        """Carry out requests as they arrive."""
        while True:
            for file in sorted(self._folder.requests.glob("ask_*.json")):
                answer = self._carry_out(file.read_bytes())
                write_atomically(file.with_name(file.name.replace("ask_", "answer_")), encode(answer))
                file.unlink(missing_ok=True)
            await asyncio.sleep(POLL_S)

    def _carry_out(self, content: bytes) -> Answer:
        try:
            request = decode(content, ServersRequest)
            if request.action == "add":
                slots = [self._fleet.add() for _ in range(request.count)]
                return Answer(
                    True, f"servers {', '.join(map(str, slots))} are starting; they sample once they hold the current weights"
                )
            slots = [self._slot(which) for which in request.which]
            for slot in slots:
                self._fleet.remove(slot)
            return Answer(True, f"servers {', '.join(map(str, slots))} are removed; the others sample again what they had begun")
        except ValueError as error:  # FleetError, or not a request
            return Answer(False, str(error))

    def _slot(self, which: str) -> int:
        found = next((s.slot for s in self._fleet.servers if which in (str(s.slot), s.url)), None)
        if found is None:
            there = ", ".join(f"{s.slot} ({s.url or s.state})" for s in self._fleet.servers if not s.unwanted)
            raise FleetError(f"there is no server {which!r}; servers are {there}")
        return found
