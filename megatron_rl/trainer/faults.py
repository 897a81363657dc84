"""No rank waits for another for ever: whatever ends one rank ends all of them, and each log says which rank it was and why.

    main thread of a rank          the store of the ranks            a watch: one thread in each rank
    a collective raises ────▶ questions += 1 ─────────────────▶ writes where its rank's main thread stands
    names the missing ranks ◀── answers ◀──────────────────────┘
    fails for any reason ───▶ fault ──────────────────────────▶ logs it and ends its process, whatever that is doing

A collective raises when its time is over (trainer.collective_timeout_s) or when the process of a peer ends. Nothing of this is on
the path of a step: a watch asks the store twice a second.

Over NCCL a collective that is late does not raise: torch ends the process, and says which ranks did not come
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

import torch.distributed as dist

from megatron_rl.errors import RunError
from megatron_rl.wire.control import decode, encode

logger = logging.getLogger(__name__)

POLL_S = 0.5
ANSWER_S = 10 * POLL_S
"""How long a rank that is there may take to say where it stands, and at the end to hear of a fault."""

_FAULT, _QUESTIONS = "fault", "questions"
_SILENT = "which does not answer: its process has ended, or has not begun"
_OF_TORCH = f"{os.sep}torch{os.sep}distributed{os.sep}"
_OURS = f"{os.sep}megatron_rl{os.sep}"
_PASS_ON = (f"trainer{os.sep}ranks.py", f"trainer{os.sep}faults.py", "contextlib.py")
_WAITS = ("wait(", "synchronize(", "barrier(")


class RankFaultError(RunError, RuntimeError):
    """A rank has failed, or did not come to a collective; the message is the same on every rank."""


@dataclass(frozen=True)
class StackLocation:
    """Where the main thread of a rank stands."""

    place: str
    """For a person: 'all_reduce, in step_once (trainer/loop.py:120)'."""
    waits: bool
    """In a collective, for others."""


class FaultWatch:
    """One rank's watch. store: the one through which the ranks met."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store = dist.PrefixStore("faults", store)
        # A client of its own: the first one may be waiting for a key.
        self._own = dist.PrefixStore("faults", store.clone())
        self._main = threading.current_thread()
        self._failed_at: StackLocation | None = None
        self._answered = 0
        self._silent: set[int] = set()
        self._fault = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fault-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def explain(self, error: BaseException) -> RankFaultError:
        """What is wrong, told to all ranks; of several faults the one that was told first."""
        self._failed_at = _standing(traceback.extract_tb(error.__traceback__))
        own = f"rank {self._rank}: {type(error).__name__}: {error}"
        try:
            if not (known := _text(self._store, _FAULT)):
                own = self._missing(error) if is_of_a_collective(error) else own
                known = self._store.compare_set(_FAULT, "", own).decode()
            self.close()
            self._hear(self._store)
        except dist.DistError as gone:  # rank 0 has left, once this rank's watch had heard of the fault, or has died
            known = self._fault or f"{own}\n  {_without_store(gone)}"
        return RankFaultError(known)

    def _hear(self, store: dist.Store) -> None:
        """Tell that this rank knows of the fault. Rank 0, which serves the store, stays until all that live know of it."""
        store.set(_heard_key(self._rank), "")
        if self._rank == 0:
            self._wait(lambda: store.check([_heard_key(rank) for rank in range(self._world_size) if rank not in self._silent]))

    def _missing(self, error: BaseException) -> str:
        """Ask all where they stand, and name those that keep the others waiting."""
        number = self._store.add(_QUESTIONS, 1)
        keys = [_answer_key(number, rank) for rank in range(self._world_size)]
        self._wait(lambda: self._store.check(keys) or self._store.check([_FAULT]))  # whoever has told a fault may answer no more
        found = {rank: _read(self._store, key) for rank, key in enumerate(keys)}
        self._silent = {rank for rank, where in found.items() if where is None}
        lines = [f"rank {self._rank} waited in vain in {self._failed_at.place}: {str(error).splitlines()[0]}"]
        lines += [
            f"missing is rank {rank}, {where.place if where else _SILENT}"
            for rank, where in found.items()
            if not (where and where.waits)
        ]
        lines += [
            f"rank {rank} waits in {where.place}" for rank, where in found.items() if where and where.waits and rank != self._rank
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
                self._hear(self._own)
            except dist.DistError as error:
                self._fault = self._fault or _without_store(error)
            if not self._over.is_set():
                self._end(self._fault)

    def _answer(self) -> None:
        for number in range(self._answered + 1, self._own.add(_QUESTIONS, 0) + 1):
            where = self._failed_at or _standing(traceback.extract_stack(sys._current_frames()[self._main.ident]))
            self._own.set(_answer_key(number, self._rank), encode(where))
            self._answered = number

    def _end(self, fault: str) -> None:
        """Of the process: its main thread may be in a collective that nobody will finish."""
        logger.critical("rank %d ends, since a rank has failed:\n%s", self._rank, fault)
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(1)


@contextmanager
def fail_together(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """For the length of the block, a fault of one rank is one of all. Raises RankFaultError from whatever the block raised.

    All ranks leave the block together: afterwards none looks for another.
    """
    watch = FaultWatch(store, rank, world_size)
    try:
        yield
        dist.barrier()
    except SystemExit:  # of all ranks, at the same point
        dist.barrier()
        raise
    except (
        BaseException
    ) as error:  # also torch's CheckpointException, which is no Exception: the others must not wait for this rank
        raise watch.explain(error) from error
    finally:
        watch.close()


def is_of_a_collective(error: BaseException) -> bool:
    """Whether torch says that a collective broke or that its time was over: Gloo does so by plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def _standing(stack: Sequence[traceback.FrameSummary]) -> StackLocation:
    """stack: outermost frame first. The operation is the outermost call into torch.distributed of those at its end."""
    inside = len(stack)
    while inside and _OF_TORCH in stack[inside - 1].filename:
        inside -= 1
    operations = [frame.name for frame in stack[inside:] if frame.name != "wrapper"]
    waits = bool(operations) or any(word in (stack[-1].line or "") for word in _WAITS)
    caller = next((frame for frame in reversed(stack[:inside]) if _is_the_programs(frame.filename)), stack[inside - 1])
    innermost = operations[0] if operations else f"{stack[-1].name} ({_place(stack[-1])})"
    return StackLocation(f"{innermost}, in {caller.name} ({_place(caller)})", waits)


def _is_the_programs(file: str) -> bool:
    """Not of an installed package, nor of the modules that only pass a collective on."""
    return (_OURS in file or "site-packages" not in file) and not file.endswith(_PASS_ON)


def _place(frame: traceback.FrameSummary) -> str:
    """The last two parts of the file's path, and the line."""
    return f"{os.sep.join(frame.filename.split(os.sep)[-2:])}:{frame.lineno}"


def _without_store(error: Exception) -> str:
    return f"missing is rank 0, which does not answer: its process has ended, and with it the ranks' store ({str(error).splitlines()[0]})"


def _heard_key(rank: int) -> str:
    return f"heard/{rank}"


def _answer_key(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"


def _text(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _read(store: dist.Store, key: str) -> StackLocation | None:
    return decode(store.get(key), StackLocation) if store.check([key]) else None
