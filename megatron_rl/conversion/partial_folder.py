"""A folder under a temporary name until it is complete; an interrupted one can be continued, file by file."""

import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.errors import accessing

_JOURNAL = "finished.jsonl"


class PartialFolder:
    """Files are written in `path`; `publish` gives the folder its name.

    Args:
        folder: The final name; must not exist, or be an empty folder.
        fingerprint: Fingerprint of the input. With it, an interrupted folder stays, and a later one with the same fingerprint and
            resume=True finds its finished files. None: an interrupted folder is removed.
        resume: Continue an interrupted folder if there is one.

    Raises:
        CheckpointError: The folder exists, or an interrupted one is there that may not be continued.
        FileAccessError: The folder cannot be created.
    """

    def __init__(self, folder: Path, fingerprint: str | None = None, *, resume: bool = False) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} already exists; remove it or choose another folder")
        self.path = folder.with_name(f".{folder.name}.partial" + ("" if fingerprint else f"-{os.getpid()}"))
        self.finished: dict[str, Any] = self._earlier() if resume and fingerprint else {}
        """Files that an earlier attempt completed, with their notes."""
        if self.path.exists() and not self.finished:
            if fingerprint and not resume:
                raise CheckpointError(
                    f"{self.path} is left over from an interrupted conversion: continue it with --resume, or remove it"
                )
            shutil.rmtree(self.path)
        with accessing(self.path, "choose another folder"):
            self.path.mkdir(parents=True, exist_ok=True)
        if not self.finished:
            self._note({"fingerprint": fingerprint})
        self._syncer = ThreadPoolExecutor(1)
        self._syncing: list[Future] = []

    def finish(self, descriptor: int, file: str, note: Any = None) -> None:
        """Sync a complete file to disk in a thread, then note it in the journal.

        Args:
            descriptor: Descriptor of the file; it is closed.
            file: Its name.
            note: Plain values that `finished` has for it after a restart.
        """
        self._syncing.append(self._syncer.submit(self._sync, descriptor, file, note))

    def publish(self) -> None:
        """Wait until all files are on disk, then rename the folder."""
        self._wait()
        (self.path / _JOURNAL).unlink()
        if self._folder.exists():
            self._folder.rmdir()  # an empty one
        self.path.rename(self._folder)
        directory = os.open(self._folder.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name itself is on disk
        finally:
            os.close(directory)

    def abandon(self) -> None:
        """After an error: remove the folder, unless it can be continued."""
        self._syncer.shutdown(wait=True)
        if self._fingerprint is None:
            shutil.rmtree(self.path, ignore_errors=True)

    def _wait(self) -> None:
        for future in self._syncing:
            future.result()
        self._syncer.shutdown(wait=True)

    def _sync(self, descriptor: int, file: str, note: Any) -> None:
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._note({"file": file, "note": note})

    def _note(self, entry: dict[str, Any]) -> None:
        with open(self.path / _JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(entry) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def _earlier(self) -> dict[str, Any]:
        journal = self.path / _JOURNAL
        if not journal.is_file():
            return {}
        # The last line may have been cut off with the process.
        lines = [line for line in journal.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        entries = [json.loads(line) for line in lines]
        if not entries or entries[0].get("fingerprint") != self._fingerprint:
            raise CheckpointError(
                f"{self.path} is left over from a conversion of another source, or of the source before it was changed; "
                "remove it and start again"
            )
        journal.write_text("".join(lines), encoding="utf-8")
        return {entry["file"]: entry["note"] for entry in entries[1:]}
