"""A weight update of all servers, as one transaction per server: it holds the new version whole, or it is out."""

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
    """What an update came to.

    held: the servers that hold `version` and are sampling again. failed: the others, with the reason. They are paused and may
    hold a mixture of weights: stop and restart them. (A later update makes one whole whose process still works, if it has one
    worker; with several, vLLM's executor loses step with its workers when one of them raises, so even their answers are stale.)
    pause_s, transfer_s, resume_s: seconds until all were paused; from then until the weights were verified; and until all had
    resumed.
    """

    version: int
    held: tuple[str, ...]
    failed: Mapping[str, str]
    num_bytes: int
    pause_s: float
    transfer_s: float
    resume_s: float


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
    """Bring every server to `version`, on trainer rank 0, and report which of them hold it.

    `source` is iterated exactly once, to its end, whatever happens to the servers, so the other ranks do the same and need not be
    told how it went; another attempt is another call, on all ranks. Raises only what `source` raises; then no server has
    resumed.

    key: the run's, which the servers ask for. timeout_s: for a server to have loaded everything, from the end of the stream on (the sender has its own bound on the stream:
    one that counted from the beginning would make every server pay for the slowest). route_timeout_s: for each other call.
    """
    started = time.monotonic()
    with httpx.Client(headers=with_key(key), trust_env=False) as client:
        update = _Update([engine.server_control(server, client, route_timeout_s) for server in servers], sender)
        update.on_each(lambda server: server.pause())
        paused = time.monotonic()
        update.fail(sender.connect(update.whole))
        update.on_each(lambda server: server.start_update())
        update.transfer(source, version, timeout_s)
        update.on_each(lambda server: server.finish_update(version))
        update.on_each(lambda server: sender.confirm(server, version))
        update.on_each(lambda server: server.reset_prefix_cache())
        verified = time.monotonic()
        update.on_each(lambda server: server.resume())
    return UpdateReport(
        version=version,
        held=tuple(server.address.name for server in update.whole),
        failed=update.failed,
        num_bytes=sum(spec.num_bytes for spec in source.specs),
        pause_s=paused - started,
        transfer_s=verified - paused,
        resume_s=time.monotonic() - verified,
    )


class _Update:
    """The servers of one update: `whole` are those for which every call has succeeded so far; the rest are in `failed`."""

    def __init__(self, servers: Sequence[ServerControl], sender: WeightSender):
        self.whole = list(servers)
        self.failed: dict[str, str] = {}
        self._sender = sender

    def fail(self, reasons: Mapping[str, str]) -> None:
        """Take these servers out. Their group is dropped: it may be in the middle of a broadcast."""
        for name, reason in reasons.items():
            self.failed.setdefault(name, reason)
            self._sender.disconnect(name)
        self.whole = [server for server in self.whole if server.address.name not in self.failed]

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
            self._sender.close()  # the servers would wait for the rest of the stream
            raise
        # A server that lost the stream may be stuck in it; its answer is not waited for. The others' reasons are their own words.
        self.fail(_gather({name: reply for name, reply in replies.items() if name not in lost}, timeout_s))
        self.fail(lost)

    def _launch(self, call: Callable[[ServerControl], None]) -> dict[str, Future]:
        pool = ThreadPoolExecutor(max(1, len(self.whole)))
        calls = {server.address.name: pool.submit(call, server) for server in self.whole}
        pool.shutdown(wait=False)
        return calls


def _gather(calls: Mapping[str, Future], timeout_s: float | None = None) -> dict[str, str]:
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
