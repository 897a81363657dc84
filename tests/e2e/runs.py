"""Small deterministic runs of the complete program, and their processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "megatron_rl.launch.cli"]
CONFIG = REPOSITORY / "model_configs" / "tiny-moe-cpu.toml"
SMALL = [
    "--run.deterministic", "true", "--supervised.steps", "0", "--task.reward", "tests.e2e.rewards:variety",
    "--rollouts.prompts_per_step", "2", "--rollouts.samples_per_prompt", "4", "--rollouts.max_new_tokens", "6",
    "--weight_sync.probe_prompts", "1", "--checkpoint.every", "2", "--model.architecture.hidden_size", "64",
]  # fmt: skip


def train_command(folder: Path, *words: str) -> list[str]:
    return [*PROGRAM, "train", str(CONFIG), *SMALL, "--run.folder", str(folder.parent), "--run.name", folder.name, *words]


def run(command: list[str], timeout_s: float = 400) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=REPOSITORY, check=False)


def replay(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return run([*PROGRAM, "replay", str(folder), *words])


def processes_of(folder: Path) -> Iterator[tuple[int, str]]:
    """Process id and command line of every process of this run."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            yield int(entry.parent.name), line


def process_of(folder: Path, module: str, rank: int | None = None) -> int:
    """The one process of a run that executes this module; of the trainer's processes the one with this rank.

    Processes that it forked have the same command line, and do not count.
    """
    alike = [pid for pid, line in processes_of(folder) if f"-m {module} " in line and (rank is None or _rank_of(pid) == rank)]
    found = [pid for pid in alike if _parent_of(pid) not in alike]
    assert len(found) == 1, f"{module}, rank {rank}: {found} of {list(processes_of(folder))}"
    return found[0]


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _rank_of(pid: int) -> int:
    environment = dict(item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item)
    return int(environment["RANK"])


def eventually(condition: Callable[[], object], timeout_s: float, every_s: float = 0.05) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def said(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text(errors="replace")


def kill_9(pid: int) -> None:
    os.kill(pid, 9)
