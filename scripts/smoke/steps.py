"""The steps, in the order in which a user would meet trouble. tests/gpu holds the same checks for pytest."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.metrics import read_rows
from megatron_rl.processes.gpus import Gpu

Numbers = Mapping[str, float]

PROGRAM = (sys.executable, "-m", "megatron_rl.launch.cli")
CONFIG = "model_configs/tiny-moe-cpu.toml"
SMALL = (
    "--run.steps", "2", "--supervised.steps", "0", "--rollouts.prompts_per_step", "4", "--rollouts.samples_per_prompt", "4",
    "--weight_sync.probe_prompts", "2", "--model.architecture.num_hidden_layers", "2",
)  # fmt: skip
ON_GPU = (
    "--run.device", "cuda", "--model.dtype", "bfloat16", "--servers.gpu_memory_utilization", "0.3",
    "--servers.extra_arguments", '["--enforce-eager"]',
)  # fmt: skip
DETERMINISTIC = ("--run.deterministic", "true")
ONE_RANK = ("--layout.world_size", "1", "--layout.expert", "1")
TWO_RANKS = {
    "tp2": ("--layout.world_size", "2", "--layout.tensor", "2", "--layout.expert", "1"),
    "ep2": ("--layout.world_size", "2", "--layout.expert", "2"),
    "pp2": ("--layout.world_size", "2", "--layout.pipeline", "2", "--layout.expert", "1"),
}
PARTS = ("step_s", "assemble_s", "score_s", "forward_backward_s", "optimizer_s", "trainer_waits_s", "sync_s", "sync_transfer_s")


@dataclass(frozen=True)
class Step:
    """One check."""

    name: str
    """For --only, and of its log."""
    what: str
    commands: tuple[tuple[str, ...], ...] = ()
    """Run one after the other; all have to end with status 0."""
    limit_s: float = 120.0
    gpus: int = 0
    """So many GPUs are needed."""
    needs_fp4: bool = False
    after: tuple[str, ...] = ()
    """Steps of which one has to have passed."""
    runs: tuple[str, ...] = ()
    """Names of the runs that this step looks at, in the folder of all runs; the first that has metrics counts."""
    read: Callable[[Path], Numbers] | None = None
    """From the folder of such a run to the numbers of the step."""


def steps(folder: Path, gpus: tuple[Gpu, ...]) -> list[Step]:
    """All steps of this machine; without a GPU also those that stand in for one.

    Args:
        folder: Takes logs and runs.
        gpus: Those of the machine.
    """
    common = [
        Step("doctor", "what this machine has", ((*PROGRAM, "doctor", CONFIG, "--run.device", "cuda" if gpus else "cpu"),), 60),
        Step("contracts", "the program against the kept facts of the GPU packages", (_pytest("tests/contracts"),), 300),
    ]
    if not gpus:
        interpreted = (_pytest("tests/unit/keep_set/test_triton_kernels.py"),)
        common += [
            Step("keep-set-interpreted", "keep-set kernels against float64, in Triton's interpreter", interpreted, 300),
            _training(folder, "cpu", "two steps of the tiny model on the CPU", ("--run.device", "cpu", *DETERMINISTIC), gpus=0),
            _rerun(folder, "cpu-rerun", "cpu"),
        ]
    return [*common, *_on_gpus(folder), _times()]


def _on_gpus(folder: Path) -> list[Step]:
    pair = (*ON_GPU, *ONE_RANK)
    qat = ("--precision.training", "qat", "--precision.rollouts", "nvfp4")
    # A bound that every step meets: whether the two agree is the number to look at.
    native = ("--precision.training", "native", "--precision.rollouts", "nvfp4", "--weight_sync.probe_tolerance", "10.0")
    kernels = (_pytest("tests/gpu/test_nvfp4.py"),)
    return [
        Step("installed", "versions are those that the contracts are of", (_pytest("tests/gpu/test_installed.py"),), gpus=1),
        Step("keep-set", "keep-set kernels against float64", (_pytest("tests/gpu/test_keep_set.py"),), 180, gpus=1),
        Step("te", "Transformer Engine's layers against the CPU's", (_pytest("tests/gpu/test_transformer_engine.py"),), gpus=1),
        Step("muon", "Muon against the CPU's", (_pytest("tests/gpu/test_muon.py"),), gpus=1),
        Step("answer", "a server's answer decoded", (_pytest("tests/gpu/test_server.py"),), 240, gpus=1),
        _training(folder, "nccl", "a weight update over NCCL and its probe", pair, gpus=2),
        *(
            _training(folder, name, f"two steps of the tiny model at {name[:2].upper()} 2", (*ON_GPU, *layout), gpus=3)
            for name, layout in TWO_RANKS.items()
        ),
        _training(folder, "deterministic", "two deterministic steps", (*pair, *DETERMINISTIC), gpus=2),
        _rerun(folder, "rerun", "deterministic", gpus=2),
        Step("nvfp4-bytes", "NVFP4: Transformer Engine's kernel gives the servers' bytes", kernels, 180, gpus=1, needs_fp4=True),
        _training(folder, "nvfp4", "NVFP4: servers with vLLM's layers, QAT", (*pair, *qat), gpus=2, needs_fp4=True),
        _training(folder, "nvfp4-native", "NVFP4: Transformer Engine's products", (*pair, *native), gpus=2, needs_fp4=True),
    ]


def _times() -> Step:
    found = ("nccl", "tp2", "ep2", "pp2", "cpu")
    return Step("times", "times of the last step and its parts", after=found, runs=found, read=_parts)


def _pytest(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments)


def _training(folder: Path, name: str, what: str, words: tuple[str, ...], gpus: int, *, needs_fp4: bool = False) -> Step:
    named = ("--run.folder", str(folder / "runs"), "--run.name", name)
    command = (*PROGRAM, "train", CONFIG, *SMALL, *words, *named)
    return Step(name, what, (command,), 300, gpus, needs_fp4, runs=(name,), read=_agreement)


def _rerun(folder: Path, name: str, of: str, gpus: int = 0) -> Step:
    command = (*PROGRAM, "replay", str(folder / "runs" / of), "--from-step", "0")
    return Step(name, "a rerun of both steps to the same bits", (command,), 180, gpus, after=(of,))


def _agreement(run: Path) -> Numbers:
    """Of the probes: trainer against servers, at equal weights."""
    rows = read_rows(run / "metrics.jsonl")
    name = "probe/abs_dlogp_mean"
    measured = [row.values[name] for row in rows if name in row.values]
    numbers = {"steps": float(len(rows)), "seconds of the last step": rows[-1].values["step_s"]}
    return numbers | ({"probe |dlogp|": max(measured)} if measured else {})


def _parts(run: Path) -> Numbers:
    last = read_rows(run / "metrics.jsonl")[-1].values
    return {name: last[name] for name in PARTS if name in last}
