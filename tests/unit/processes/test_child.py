"""Children are stopped together with all processes that they started, and die with their parent."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from megatron_rl.processes import Child, Command, PortError, ProcessError, check_host, check_port, free_ports, stop_all

SPAWN_AND_SLEEP = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def python(name, code, tmp_path, **env) -> Child:
    return Child(Command(name, [sys.executable, "-c", code], tmp_path / f"{name}.log", env))


def test_grandchildren_end_with_the_child(tmp_path):
    child = python("parent", SPAWN_AND_SLEEP, tmp_path)
    log = tmp_path / "parent.log"
    assert eventually(lambda: log.read_text().strip().isdigit())
    grandchild = int(log.read_text())
    assert alive(grandchild)
    stop_all([child], grace_s=60)
    assert child.poll() == -signal.SIGTERM
    assert eventually(lambda: not alive(grandchild))


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    child = python("stubborn", code, tmp_path)
    assert eventually(lambda: "ready" in (tmp_path / "stubborn.log").read_text())
    stop_all([child], grace_s=0.2)
    assert child.poll() == -signal.SIGKILL


def test_a_child_with_its_own_stop_signal_ignores_sigterm_of_a_cancelled_job(tmp_path):
    go = tmp_path / "go"
    code = (
        f"import os, time\nprint('ready', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print('still running', flush=True)\ntime.sleep(60)"
    )
    child = Child(Command("rank", [sys.executable, "-c", code], tmp_path / "rank.log", stop_signal=signal.SIGHUP))
    assert eventually(lambda: "ready" in (tmp_path / "rank.log").read_text())
    os.kill(child.pid, signal.SIGTERM)
    go.touch()  # after the signal, so that what the child writes now was written in spite of it
    assert eventually(lambda: "still running" in (tmp_path / "rank.log").read_text())
    assert child.poll() is None
    stop_all([child], grace_s=60)
    assert child.poll() == -signal.SIGHUP


def test_processes_that_such_a_child_starts_end_by_sigterm(tmp_path):
    """A reward that runs code stops its processes in this way, those of exec and those of fork."""
    code = (
        "import multiprocessing, subprocess, sys, time\nfrom megatron_rl.processes import ignore_sigterm\nignore_sigterm()\n"
        "code = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "program = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\nprogram.stdout.readline()\n"
        "fork_runs = multiprocessing.get_context('fork').Event()\n"
        "def run():\n    fork_runs.set()\n    time.sleep(60)\n"
        "fork = multiprocessing.get_context('fork').Process(target=run)\nfork.start()\nfork_runs.wait()\n"
        "for started in (program, fork):\n    started.terminate()\n"
        "fork.join(40)\nprint(program.wait(40), fork.exitcode, flush=True)"
    )
    child = Child(Command("worker", [sys.executable, "-c", code], tmp_path / "worker.log", stop_signal=signal.SIGHUP))
    assert child.wait(120) == 0, child.failure()
    assert (tmp_path / "worker.log").read_text().split() == [str(-signal.SIGTERM)] * 2


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGHUP])
def test_children_die_when_the_parent_is_killed(tmp_path, stop_signal):
    code = (
        "import pathlib, sys, time\nfrom megatron_rl.processes import Child, Command\n"
        f"c = Child(Command('c', ['sleep', '60'], pathlib.Path({str(tmp_path)!r}) / 'c.log', stop_signal={int(stop_signal)}))\n"
        "print(c.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: not alive(pid))


def test_a_child_whose_parent_is_killed_before_exec_dies_too(tmp_path):
    """The parent has a handler for SIGTERM, as asyncio's loop installs one; until exec the child has it as well.

    The child waits before exec until its parent is dead, and then long enough for a handler to run.
    """
    log = tmp_path / "c.log"  # the child's standard output, also before exec
    code = (
        "import os, pathlib, signal, time\nimport megatron_rl.processes.child as c\nreal = c.kill_with_parent\n"
        "def slowly(*signals):\n    restore = real(*signals)\n    def hook():\n        restore()\n"
        "        parent = os.getppid()\n        os.write(1, b'%d\\n' % os.getpid())\n"
        "        while os.getppid() == parent: pass\n"
        "        end = time.monotonic() + 0.2\n        while time.monotonic() < end: pass\n    return hook\n"
        "c.kill_with_parent = slowly\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
        f"c.Child(c.Command('c', ['sleep', '600'], pathlib.Path({str(log)!r})))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    assert eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    pid = int(log.read_text())
    parent.kill()
    parent.wait()
    assert eventually(lambda: not alive(pid))


def test_failure_names_the_child_and_shows_its_log(tmp_path):
    child = python("worker", "print('the reason'); raise SystemExit(3)", tmp_path)
    assert child.wait(60) == 3
    assert "worker ended with status 3" in child.failure() and "the reason" in child.failure()


def test_environment_is_added_to_the_parents(tmp_path):
    child = python(
        "env", "import os; raise SystemExit(int(os.environ['WANTED']) if 'PATH' in os.environ else 1)", tmp_path, WANTED="7"
    )
    assert child.wait(60) == 7


def test_an_unknown_program_is_named(tmp_path):
    with pytest.raises(ProcessError, match="ghost: could not be started.*no-such-program"):
        Child(Command("ghost", ["no-such-program"], tmp_path / "log"))


def test_ports():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    check_port("127.0.0.1", ports[0], "a server")
    with socket.socket() as s:
        s.bind(("127.0.0.1", ports[0]))
        s.listen()
        with pytest.raises(PortError, match=f"servers.first_port: 127.0.0.1:{ports[0]}"):
            check_port("127.0.0.1", ports[0], "servers.first_port")


def test_an_empty_host_would_be_every_address():
    with pytest.raises(PortError, match="servers.host = '': would listen on every address"):
        check_host("", "servers.host")
    check_host("127.0.0.1", "servers.host")
