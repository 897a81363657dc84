"""No process of a rollout server outlives the one that started it, however that one ends.

vLLM's workers watch a pipe to their engine process. The engine process watches nothing: when its server is killed, it keeps the
GPU's memory. On a GPU it is spawned, so nothing that the server sets up for its forks reaches it; but vLLM loads the plugin
there.
"""

import os
import signal
import threading
import time

SERVER_VARIABLE = "MEGATRON_RL_SERVER_PID"
"""The process of the server, which leads the process group of all that it starts."""

PARENT_POLL_S = 0.5
SHUTDOWN_GRACE_S = 5.0


def lead_the_server(grace_s: float = SHUTDOWN_GRACE_S) -> None:
    """For the server itself: make it the leader of its process group, and end the group after this process's parent."""
    if os.getpgrp() != os.getpid():  # started by hand, in the group of a shell's pipeline
        os.setpgid(0, 0)
    os.environ[SERVER_VARIABLE] = str(os.getpid())
    _end_with_parent(os.getpid(), grace_s)


def follow_the_server(grace_s: float = SHUTDOWN_GRACE_S) -> None:
    """For a process that vLLM started: end the server's group after this process's parent. Elsewhere it does nothing."""
    server = int(os.environ.get(SERVER_VARIABLE, "0"))
    is_running = any(thread.name == _THREAD for thread in threading.enumerate())  # vLLM loads a plugin more than once
    if server in (0, os.getpid()) or os.getpgrp() != server or is_running:
        return
    _end_with_parent(server, grace_s)


_THREAD = "end-with-parent"


def _end_with_parent(group: int, grace_s: float) -> None:
    """End this process when its parent exits, by SIGTERM first; after the grace, all of the group.

    The kernel's own signal for this (PR_SET_PDEATHSIG) is sent when the parent's *thread* ends that started the process, which
    would kill the servers of a program that starts them from a short-lived thread. So the parent is polled.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.killpg(group, signal.SIGKILL)

    threading.Thread(target=watch, name=_THREAD, daemon=True).start()
