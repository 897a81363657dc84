"""Scalars for TensorBoard, by tensorboard's own writer.

torch's writer and tensorboardX import torch, which the orchestrator must not.
"""

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardFile:
    """One events file in `folder`; a resumed run adds another, which TensorBoard reads after the first."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._writer = EventFileWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """Write one event with all values of a step, and flush it. Values beyond float32 become infinite."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
