"""Sinks that raise, hang or are slow: a step does not notice, and what was lost is counted and said once."""

import json
import threading
from pathlib import Path

import pytest

from megatron_rl.config import Config, RunFolder
from megatron_rl.metrics import Sinks, write_summary
from megatron_rl.metrics.background import BackgroundSink


def test_what_is_put_is_written_in_order_by_another_thread():
    seen = []
    sink = BackgroundSink("s", lambda a, b: seen.append((a, b, threading.current_thread().name)))
    for number in range(50):
        sink.put(number, "x")
    sink.close()
    assert [number for number, *_ in seen] == list(range(50)) and {name for *_, name in seen} == {"sink s"}
    assert sink.lost == 0 and not sink.take_faults()


def test_a_sink_that_raises_loses_its_writes_alone_and_says_it_once():
    seen = []

    def write(number):
        if number % 2:
            raise ConnectionError("no route")
        seen.append(number)

    sink = BackgroundSink("W&B", write, close=lambda: 1 / 0)
    for number in range(7):
        sink.put(number)
    sink.close()
    assert seen == [0, 2, 4, 6] and sink.lost == 4
    said = sink.take_faults()
    assert [text.partition(":")[0] for text in said] == ["W&B cannot be written", "W&B cannot be closed"]
    assert "ConnectionError: no route; the run goes on" in said[0] and "ZeroDivisionError" in said[1]


def test_a_sink_that_hangs_holds_up_neither_a_step_nor_the_end_of_a_run():
    let_go = threading.Event()
    sink = BackgroundSink("slow", lambda number: let_go.wait(60), queue_length=3)
    for number in range(10):  # one is being written, three wait
        sink.put(number)
    assert sink.lost in (6, 7)
    sink.close(timeout_s=0.05)
    let_go.set()
    said = sink.take_faults()
    assert "slow is too slow: 3 writes wait already" in said[0] and "slow has not finished" in said[1] and sink.lost >= 9


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    return folder


def test_a_step_is_recorded_whatever_tensorboard_and_the_examples_do(tmp_path: Path, folder: RunFolder, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("megatron_rl.metrics.sinks.TensorBoard.write", broken)
    config = Config.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": tmp_path / "m"},
            "task": {"name": "t"},
            "metrics": {"tensorboard": True},
        }
    )
    faults: list[str] = []
    with Sinks(config, folder, on_fault=faults.append) as sinks:
        folder.examples.chmod(0o700)
        folder.examples.rmdir()
        for step in range(3):
            sinks.write(step, {"loss": 1.0})
            sinks.examples(step, [{"prompt": "p", "completion": "c", "reward": 1.0}])
    assert sinks.lost == {"TensorBoard": 3, "rollouts/": 3}
    assert len(faults) == 2 and "TensorBoard cannot be written: OSError: no space left" in " ".join(faults)
    summary = write_summary(folder.metrics_file, folder.summary_file, sinks.lost)
    assert summary["steps"] == 3
    assert json.loads(folder.summary_file.read_text())["lost_writes"] == {"TensorBoard": 3, "rollouts/": 3}
