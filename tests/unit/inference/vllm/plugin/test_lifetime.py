"""No process of a server is left over, with real processes in the places of launcher, server and engine.

The engine is spawned, as vLLM spawns it on a GPU, and is deaf to SIGTERM: it hangs in a kernel. Not proved here: vLLM itself.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY

GRACE_S = 0.5

SERVER = f"""
    import multiprocessing, os, signal, sys, time
    from megatron_rl.inference.vllm.plugin.lifetime import follow_the_server, lead_the_server

    def engine(follows):
        if follows:
            follow_the_server({GRACE_S})
            follow_the_server({GRACE_S})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(120)

    if __name__ == "__main__":
        lead_the_server({GRACE_S})
        if sys.argv[1] == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        multiprocessing.get_context("spawn").Process(target=engine, args=(sys.argv[2] == "follows",), daemon=False).start()
        time.sleep(120)
"""

LAUNCHER = "import subprocess, sys, time; subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(120)"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Processes:
    def __init__(self, folder: Path, *words: str) -> None:
        (folder / "server.py").write_text(textwrap.dedent(SERVER))
        with open(folder / "out", "wb") as out:
            command = [sys.executable, "-c", LAUNCHER, str(folder / "server.py"), *words]
            env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
            self.launcher = subprocess.Popen(command, stdout=out, cwd=folder, env=env, start_new_session=True)
        assert eventually(lambda: len((folder / "out").read_text().split()) == 2)
        self.server, self.engine = map(int, (folder / "out").read_text().split())


@pytest.fixture
def started(tmp_path) -> Iterator:
    running: list[Processes] = []

    def start(*words: str) -> Processes:
        running.append(Processes(tmp_path, *words))
        return running[-1]

    yield start
    for processes in running:
        processes.launcher.kill()
        processes.launcher.wait()
        for pid in (processes.server, processes.engine):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("words", [("deaf", "alone"), ("hears", "follows"), ("deaf", "follows")], ids=" ".join)
def test_all_of_the_server_ends_with_its_launcher(started, words):
    """Also where the engine does not know the plugin, and where the server has gone in peace and left its engine."""
    processes = started(*words)
    assert os.getpgid(processes.engine) == processes.server != os.getpgid(processes.launcher.pid)
    processes.launcher.kill()
    processes.launcher.wait()
    assert eventually(lambda: not is_alive(processes.server) and not is_alive(processes.engine))


def test_the_engine_ends_with_a_server_that_is_killed(started):
    processes = started("hears", "follows")
    os.kill(processes.server, signal.SIGKILL)
    assert eventually(lambda: not is_alive(processes.engine))
    assert processes.launcher.poll() is None, "only the server's group is killed"


def test_what_is_no_rollout_server_is_left_alone():
    code = "import threading; from megatron_rl.inference.vllm.plugin.lifetime import follow_the_server as f; f(); "
    code += "assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
