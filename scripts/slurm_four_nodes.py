"""A real Slurm of four nodes on one machine, to try `megatron-rl launch` without a cluster, and for its tests.

    python scripts/slurm_four_nodes.py up FOLDER       # then: export SLURM_CONF=FOLDER/slurm.conf; sinfo
    python scripts/slurm_four_nodes.py down FOLDER

Needs Debian's or Ubuntu's slurm-wlm and munge, and root. Keys, sockets, state and logs are in FOLDER; an installed Slurm or munge
of the machine is not changed. It lacks what a cluster has: cgroups, accounting, containers, GPUs, several machines.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo")
NODES = ("n1", "n2", "n3", "n4")
START_S = 60

CONF = """\
ClusterName=four
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job waits until its credentials have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_after_s}
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmdParameters=config_overrides
KillWait=15
# The controller pings the nodes after each third of it, and then looks again at jobs that may start now.
SlurmdTimeout=60
# Only the backfill scheduler starts heterogeneous jobs; by default it runs every 30 s.
SchedulerParameters=bf_interval=2
ReturnToService=2
MpiDefault=none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def up(folder: Path, requeue_after_s: int) -> None:
    """Start munge, the controller and four node daemons; return when the nodes are idle."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        sys.exit(f"{', '.join(missing)}: not in PATH; install them: apt-get install slurm-wlm munge")
    if (folder / "slurm.conf").exists():
        sys.exit(f"{folder} already holds a Slurm: stop it with `down`, and give another folder")
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)  # munge's clients have to reach its socket
    _start_munge(folder)
    host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(NODES))
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    conf = CONF.format(host=host, ports=ports, folder=folder, requeue_after_s=requeue_after_s, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(conf)
    _call("slurmctld", "-f", str(folder / "slurm.conf"), "-c")
    for name in NODES:
        (folder / f"spool-{name}").mkdir()
        _call("slurmd", "-f", str(folder / "slurm.conf"), "-N", name)
    _wait_until_idle(folder)
    print(f"export SLURM_CONF={folder}/slurm.conf")


def down(folder: Path) -> None:
    """Stop all jobs, then all daemons."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["scancel", "--signal=KILL", "--full", "--me"], env=environment, check=False, timeout=30)
    subprocess.run(["scancel", "--me"], env=environment, check=False, timeout=30)
    _end([folder / f"{name}.pid" for name in [*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"]])


def _start_munge(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {
        "socket": "munge.socket",
        "key-file": "munge.key",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munge.seed",
    }
    _call("munged", "--force", *(f"--{option}={folder / name}" for option, name in files.items()))


def _wait_until_idle(folder: Path) -> None:
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    deadline = time.monotonic() + START_S
    states: list[str] = []
    while time.monotonic() < deadline:
        listed = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=environment, capture_output=True, text=True, check=False
        )
        states = listed.stdout.split()
        if states == ["idle"] * len(NODES):
            return
        time.sleep(0.5)
    sys.exit(f"the nodes are not idle after {START_S} s, but {states}; see {folder}/*.log")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}: {done.stderr.strip()}")


def _end(pid_files: list[Path]) -> None:
    """Stop the daemons of these pid files; return when they have exited."""
    running = [int(file.read_text()) for file in pid_files if file.exists()]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 10.0
        while running and time.monotonic() < deadline:
            running = [pid for pid in running if Path(f"/proc/{pid}").exists()]
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--requeue-after",
        type=int,
        default=120,
        metavar="S",
        help="seconds that a requeued job waits (default: Slurm's)",
    )
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    up(folder, arguments.requeue_after) if arguments.action == "up" else down(folder)


if __name__ == "__main__":
    main()
