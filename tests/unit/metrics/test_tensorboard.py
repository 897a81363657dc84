"""What TensorBoard's own reader finds in the file."""

import math

import pytest
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from megatron_rl.metrics.tensorboard import TensorBoardFile


def events(folder) -> list[Event]:
    (path,) = folder.iterdir()
    return [Event.FromString(data) for data in RawEventFileLoader(str(path)).Load()]


def test_what_is_written_is_read_before_the_file_is_closed(tmp_path):
    file = TensorBoardFile(tmp_path / "tb")
    file.scalars(3, {"reward_mean": 0.5, "probe/ratio_mean": 1.25}, wall_time=1234.5)
    file.scalars(1000, {"loss": float("inf")}, wall_time=1235.0)
    head, *written = events(tmp_path / "tb")
    file.close()
    assert head.file_version == "brain.Event:2"
    assert [(e.wall_time, e.step) for e in written] == [(1234.5, 3), (1235.0, 1000)]
    values = [{v.tag: v.simple_value for v in e.summary.value} for e in written]
    assert values == [{"reward_mean": 0.5, "probe/ratio_mean": 1.25}, {"loss": float("inf")}]


def test_a_resumed_run_adds_a_file(tmp_path):
    for _ in range(2):
        TensorBoardFile(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("value", [1e300, -1e300])
def test_a_number_beyond_float32_does_not_stop_the_run(tmp_path, value):
    file = TensorBoardFile(tmp_path)
    file.scalars(0, {"x": value}, wall_time=0.0)
    file.close()
    (found,) = events(tmp_path)[1].summary.value
    assert math.isinf(found.simple_value) and math.copysign(1, found.simple_value) == math.copysign(1, value)
