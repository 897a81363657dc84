"""A weight update of all servers, as one transaction per server: it holds the complete new version, or it has failed."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import httpx

from megatron_rl.inference.engine import InferenceEngine
from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import ServerAddress, ServerControl, WeightSender, WeightSource
from megatron_rl.wire.access import with_key


@dataclass(frozen=True)
class UpdateReport:
    """The result of an update."""

    version: int
    held: tuple[str, ...]
    """Names of the servers that hold `version` and are sampling again."""
    failed: Mapping[str, str]
    """Names of the others, with the reason. They are paused and may hold a mixture of weights: stop and restart them. (A later
    update repairs a server whose process still works, if it has one worker. With several, vLLM's executor loses step with its
    workers when one of them raises, so even their answers are stale.)"""
    num_bytes: int
    """Bytes of all tensors."""
    pause_s: float
    """Until all servers were paused."""
    transfer_s: float
    """From then until the weights were verified."""
    resume_s: float
    """From then until all had resumed."""


def update_servers(
    engine: InferenceEngine,
    sender: WeightSender,
    servers: Sequence[ServerAddress],
    source: WeightSource,
    version: int,
    *,
    key: str,
    timeout_s: float = 300.0,
    route_timeout_s: float = 60.0,
) -> UpdateReport:
    """Update every server to `version`, on trainer rank 0, and report which of them hold it.

    `source` is iterated exactly once, to its end, whatever happens to the servers. So the other ranks do the same and need not
    know the result; another attempt is another call, on all ranks. Raises only what `source` raises; then no server has resumed.

    Args:
        engine: The run's.
        sender: Made by `engine`.
        servers: All servers to update.
        source: The weights.
        version: The policy version that they are.
        key: The run's, which the servers ask for.
        timeout_s: For a server to have loaded everything, counted from the end of the stream. (The sender bounds the stream: a
            bound that counted from the beginning would make every server pay for the slowest.)
        route_timeout_s: For each other call.
    """
    started = time.monotonic()
    with httpx.Client(headers=with_key(key), trust_env=False) as client:
        update = _Update([engine.server_control(server, client, route_timeout_s) for server in servers], sender)
        update.on_each(lambda server: server.pause())
        paused = time.monotonic()
        update.fail(sender.connect(update.intact))
        update.on_each(lambda server: server.start_update())
        update.transfer(source, version, timeout_s)
        update.on_each(lambda server: server.finish_update(version))
        update.on_each(lambda server: sender.confirm(server, version))
        update.on_each(lambda server: server.reset_prefix_cache())
        verified = time.monotonic()
        update.on_each(lambda server: server.resume())
    return UpdateReport(
        version=version,
        held=tuple(server.address.name for server in update.intact),
        failed=update.failed,
        num_bytes=sum(spec.num_bytes for spec in source.specs),
        pause_s=paused - started,
        transfer_s=verified - paused,
        resume_s=time.monotonic() - verified,
    )


class _Update:
    """The servers of one update: for those in `intact` every call has succeeded so far; the others are in `failed`."""

    def __init__(self, servers: Sequence[ServerControl], sender: WeightSender) -> None:
        self.intact = list(servers)
        self.failed: dict[str, str] = {}
        self._sender = sender

    def fail(self, reasons: Mapping[str, str]) -> None:
        """Drop these servers and their groups, which may be in the middle of a broadcast."""
        for name, reason in reasons.items():
            self.failed.setdefault(name, reason)
            self._sender.disconnect(name)
        self.intact = [server for server in self.intact if server.address.name not in self.failed]

    def on_each(self, call: Callable[[ServerControl], None]) -> None:
        """Make one call to all servers at the same time."""
        self.fail(_gather(self._launch(call)))

    def transfer(self, source: WeightSource, version: int, timeout_s: float) -> None:
        """Announce the stream to all servers and send it while they receive."""
        announcement = self._sender.announcement(source.specs, version)
        replies = self._launch(lambda server: server.receive(announcement))
        try:
            lost = self._sender.stream(source)
        except BaseException:
            self._sender.close()  # or the servers would wait for the rest of the stream
            raise
        # A server that lost the stream may be stuck in it, so its answer is not awaited. The others give their own reasons.
        self.fail(_gather({name: reply for name, reply in replies.items() if name not in lost}, timeout_s))
        self.fail(lost)

    def _launch(self, call: Callable[[ServerControl], None]) -> dict[str, Future[None]]:
        pool = ThreadPoolExecutor(max(1, len(self.intact)))
        calls = {server.address.name: pool.submit(call, server) for server in self.intact}
        pool.shutdown(wait=False)
        return calls


def _gather(calls: Mapping[str, Future[None]], timeout_s: float | None = None) -> dict[str, str]:
    """Wait for all calls, at most `timeout_s` in all; the reasons of those that failed."""
    wait(calls.values(), timeout_s)
    failures = {}
    for name, call in calls.items():
        try:
            call.result(timeout=0 if timeout_s is not None else None)
        except ServerError as error:
            failures[name] = str(error)
        except TimeoutError:
            failures[name] = f"server {name} had not loaded the weights {timeout_s:g} s after the end of the stream"
    return failures
