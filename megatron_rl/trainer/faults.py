"""No rank waits for another for ever: a fault of one rank ends all of them, and each log names the rank and the reason.

    main thread of a rank          the ranks' store                  the fault watch: one thread in each rank
    a collective raises ────▶ questions += 1 ─────────────────▶ writes the stack location of its rank's main thread
    names the missing ranks ◀── answers ◀──────────────────────┘
    fails for any reason ───▶ fault ──────────────────────────▶ logs it and ends its process, whatever that is doing

A collective raises when it exceeds trainer.collective_timeout_s or when the process of a peer exits. Nothing of this is on the
path of a step: a watch polls the store twice a second.

Over NCCL a collective that exceeds its time does not raise: torch ends the process, and logs which ranks did not join
(TORCH_NCCL_DESYNC_DEBUG, which the launcher sets). That has not been seen on hardware.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_rl.errors import RunError
from megatron_rl.wire.control import decode, encode

logger = logging.getLogger(__name__)

POLL_S = 0.5
ANSWER_S = 10 * POLL_S
"""How long a live rank may take to write its stack location, and at the end to learn of a fault."""

_FAULT, _QUESTIONS = "fault", "questions"
_NO_ANSWER = "it does not answer: its process has exited, or has not started"
_OF_TORCH = f"{os.sep}torch{os.sep}distributed{os.sep}"
_OURS = f"{os.sep}megatron_rl{os.sep}"
_PASS_ON = (f"trainer{os.sep}ranks.py", f"trainer{os.sep}faults.py", "contextlib.py")
_WAITS = ("wait(", "synchronize(", "barrier(")


class RankFaultError(RunError, RuntimeError):
    """A rank has failed, or did not join a collective; the message is the same on every rank."""


@dataclass(frozen=True)
class StackLocation:
    """What the main thread of a rank is executing."""

    place: str
    """For a person: 'all_reduce, in step_once (trainer/loop.py:120)'."""
    waits: bool
    """Whether it waits for other ranks, in a collective."""


class FaultWatch:
    """One rank's watch, a thread that runs until `close`.

    Args:
        store: The ranks' store, which rank 0 serves.
        rank: This process's.
        world_size: Number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store = dist.PrefixStore("faults", store)
        # The thread's own connection: the main thread's may be waiting for a key.
        self._own = dist.PrefixStore("faults", store.clone())  # type: ignore[attr-defined]  # torch's stub lacks it
        self._main_thread = threading.get_ident()
        self._failed_at: StackLocation | None = None
        self._answered = 0
        self._silent: set[int] = set()
        self._fault = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fault-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def explain(self, error: BaseException) -> RankFaultError:
        """Report this rank's fault to all ranks.

        Args:
            error: What the main thread raised.

        Returns:
            The fault to raise: of several ranks' faults the one that was reported first.
        """
        self._failed_at = failed_at = _location_of(traceback.extract_tb(error.__traceback__))
        own = f"rank {self._rank}: {type(error).__name__}: {error}"
        try:
            if not (known := _text(self._store, _FAULT)):
                own = self._missing(error, failed_at) if is_collective_error(error) else own
                known = self._store.compare_set(_FAULT, "", own).decode()
            self.close()
            self._acknowledge(self._store)
        except dist.DistError as gone:  # rank 0 has exited, after this rank's watch had acknowledged the fault, or has died
            known = self._fault or f"{own}\n  {_without_store(gone)}"
        return RankFaultError(known)

    def _acknowledge(self, store: dist.Store) -> None:
        """Note that this rank knows of the fault. Rank 0, which serves the store, stays until all live ranks know of it."""
        store.set(_heard_key(self._rank), "")
        if self._rank == 0:
            self._wait(lambda: store.check([_heard_key(rank) for rank in range(self._world_size) if rank not in self._silent]))

    def _missing(self, error: BaseException, failed_at: StackLocation) -> str:
        """Ask all ranks for their stack locations, and name those that keep the others waiting."""
        number = self._store.add(_QUESTIONS, 1)
        keys = [_answer_key(number, rank) for rank in range(self._world_size)]
        self._wait(
            lambda: self._store.check(keys) or self._store.check([_FAULT])
        )  # a rank that has reported a fault may not answer
        found = {rank: _read(self._store, key) for rank, key in enumerate(keys)}
        self._silent = {rank for rank, where in found.items() if where is None}
        lines = [f"rank {self._rank}: the collective {failed_at.place} failed: {str(error).splitlines()[0]}"]
        lines += [
            f"rank {rank} is missing: {f'it is in {where.place}' if where else _NO_ANSWER}"
            for rank, where in found.items()
            if not (where and where.waits)
        ]
        lines += [
            f"rank {rank} is waiting in {where.place}"
            for rank, where in found.items()
            if where and where.waits and rank != self._rank
        ]
        return "\n  ".join(lines)

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not holds() and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            try:
                self._fault = _text(self._own, _FAULT)
                if not self._fault:
                    self._answer()
                    continue
                self._acknowledge(self._own)
            except dist.DistError as error:
                self._fault = self._fault or _without_store(error)
            if not self._over.is_set():
                self._end_process(self._fault)

    def _answer(self) -> None:
        for number in range(self._answered + 1, self._own.add(_QUESTIONS, 0) + 1):
            where = self._failed_at or _location_of(traceback.extract_stack(sys._current_frames()[self._main_thread]))
            answer = encode(where)
            self._own.set(_answer_key(number, self._rank), answer)  # type: ignore[arg-type]  # bytes, too; torch's stub lacks them
            self._answered = number

    def _end_process(self, fault: str) -> None:
        """At once: the main thread may be in a collective that nobody will finish."""
        logger.critical("rank %d exits, since a rank has failed:\n%s", self._rank, fault)
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(1)


@contextmanager
def fail_together(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """A block in which a fault of one rank ends all of them; a collective.

    All ranks leave the block together: after it no rank waits for another.

    Args:
        store: The ranks' store, which rank 0 serves.
        rank: This process's.
        world_size: Number of ranks.

    Raises:
        RankFaultError: The block raised on this rank, or another rank's fault was reported first.
    """
    watch = FaultWatch(store, rank, world_size)
    try:
        yield
        dist.barrier()
    except SystemExit:  # of all ranks, at the same point
        dist.barrier()
        raise
    # BaseException: torch's CheckpointException is no Exception, and the others must not wait for this rank either.
    except BaseException as error:
        raise watch.explain(error) from error
    finally:
        watch.close()


def is_collective_error(error: BaseException) -> bool:
    """Whether a collective broke or timed out: Gloo reports both as plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def _location_of(stack: Sequence[traceback.FrameSummary]) -> StackLocation:
    """stack: outermost frame first. The operation is the outermost of the calls into torch.distributed at its end."""
    inside = len(stack)
    while inside and _OF_TORCH in stack[inside - 1].filename:
        inside -= 1
    operations = [frame.name for frame in stack[inside:] if frame.name != "wrapper"]
    waits = bool(operations) or any(word in (stack[-1].line or "") for word in _WAITS)
    caller = next((frame for frame in reversed(stack[:inside]) if _is_program_code(frame.filename)), stack[inside - 1])
    innermost = operations[0] if operations else f"{stack[-1].name} ({_place(stack[-1])})"
    return StackLocation(f"{innermost}, in {caller.name} ({_place(caller)})", waits)


def _is_program_code(file: str) -> bool:
    """Whether it is neither an installed package's nor a module that only passes a collective on."""
    return (_OURS in file or "site-packages" not in file) and not file.endswith(_PASS_ON)


def _place(frame: traceback.FrameSummary) -> str:
    """The last two parts of the file's path, and the line."""
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"


def _without_store(error: Exception) -> str:
    reason = str(error).splitlines()[0]
    return f"rank 0 is missing: it does not answer: its process has exited, and with it the ranks' store ({reason})"


def _heard_key(rank: int) -> str:
    return f"heard/{rank}"


def _answer_key(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"


def _text(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _read(store: dist.Store, key: str) -> StackLocation | None:
    return decode(store.get(key), StackLocation) if store.check([key]) else None
