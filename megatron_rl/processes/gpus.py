"""The GPUs of this machine, asked of the driver and nvidia-smi; neither torch nor CUDA is loaded."""

import csv
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.errors import UserError
from megatron_rl.processes.device_plan import VISIBLE_DEVICES

QUERY = ("index", "name", "uuid", "memory.total", "compute_cap", "driver_version")
"""Fields of `nvidia-smi --query-gpu` (nvidia-smi --help-query-gpu)."""

NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")

_TIMEOUT_S = 30.0
"""nvidia-smi takes seconds where the driver's persistence mode is off; longer means that the driver hangs."""

FIRST_WITH_FP4 = (10, 0)
"""Compute capability of the first GPUs with FP4 tensor cores (Blackwell)."""


class GpuQueryError(UserError, RuntimeError):
    """The GPUs of this machine cannot be found out."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi describes it."""

    index: str
    """Its number, by PCI bus."""
    name: str
    uuid: str
    memory_mib: int | None
    """None: it shares the machine's memory, and nvidia-smi gives no size."""
    compute_capability: tuple[int, int]
    driver: str

    @property
    def has_fp4(self) -> bool:
        """Whether its tensor cores multiply FP4."""
        return self.compute_capability >= FIRST_WITH_FP4


Runner = Callable[[Sequence[str]], str]
"""Runs a program and returns its output. Raises GpuQueryError."""


def run_program(argv: Sequence[str]) -> str:
    """The output of a program.

    Raises:
        GpuQueryError: It is not there, fails, or hangs.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise GpuQueryError(f"{argv[0]} is not in PATH; it comes with the NVIDIA driver") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuQueryError(f"{argv[0]} does not answer ({error}); check the NVIDIA driver") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise GpuQueryError(f"{argv[0]} ended with status {done.returncode}: {said[-1]}")
    return done.stdout


def query_gpus(run: Runner = run_program) -> tuple[Gpu, ...]:
    """All GPUs that the driver shows to this process, whatever CUDA_VISIBLE_DEVICES says.

    Raises:
        GpuQueryError: nvidia-smi is not there, fails, or answers something else.
    """
    return parse_gpus(run(NVIDIA_SMI))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The answer to NVIDIA_SMI: a line of comma-separated values for each GPU.

    Raises:
        GpuQueryError: It is of another form.
    """
    found: list[Gpu] = []
    try:
        rows = list(csv.reader(text.strip().splitlines(), skipinitialspace=True))
    except csv.Error as error:
        raise GpuQueryError(f"the answer of nvidia-smi cannot be read ({error}); check the NVIDIA driver") from None
    for row in rows:
        try:
            index, name, uuid, memory, capability, driver = (value.strip() for value in row)
            major, minor = capability.split(".")
            # "[N/A]" or "[Not Supported]" on a GPU without memory of its own.
            mib = int(memory) if memory.isdigit() else None
            found.append(Gpu(index, name, uuid, mib, (int(major), int(minor)), driver))
        except ValueError:
            raise GpuQueryError(f"nvidia-smi answers {','.join(row)!r}, where {', '.join(QUERY)} was expected") from None
    if len({gpu.index for gpu in found}) < len(found):
        raise GpuQueryError(f"nvidia-smi lists a GPU more than once: {', '.join(gpu.index for gpu in found)}")
    return tuple(found)


def usable_devices(run: Runner = run_program) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES of a child may name: what this process's own names, else the number of each GPU.

    Raises:
        GpuQueryError: CUDA_VISIBLE_DEVICES is not set, and nvidia-smi does not answer.
    """
    given = os.environ.get(VISIBLE_DEVICES)
    try:
        gpus = query_gpus(run)
    except GpuQueryError:
        if given is None:
            raise
        return named_devices(given)
    return usable_of(gpus)


def usable_of(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES of a child may name, of the GPUs that nvidia-smi lists.

    Raises:
        GpuQueryError: CUDA_VISIBLE_DEVICES is not valid, or names a number that is not listed.
    """
    given, listed = os.environ.get(VISIBLE_DEVICES), [gpu.index for gpu in gpus]
    if given is None:
        return tuple(listed)
    named = named_devices(given)
    if unlisted := [name for name in named if name.isdigit() and name not in listed]:
        raise GpuQueryError(
            f"{VISIBLE_DEVICES} names GPU {', '.join(unlisted)}, and nvidia-smi lists {', '.join(listed) or 'none'}; correct "
            "it, or unset it to use all"
        )
    return named


def named_devices(variable: str) -> tuple[str, ...]:
    """The devices that a value of CUDA_VISIBLE_DEVICES names; as for CUDA, an entry such as -1 ends the list.

    Raises:
        GpuQueryError: A device is named twice, or an entry is neither a number nor a UUID.
    """
    devices: list[str] = []
    for name in (entry.strip() for entry in variable.split(",")):
        if not name or name.startswith("-"):
            break
        if not (name.isascii() and name.isdigit()) and not name.startswith(("GPU-", "MIG-")):
            raise GpuQueryError(f"{VISIBLE_DEVICES} = '{variable}': '{name}' is neither a number nor a UUID (GPU-..., MIG-...)")
        if name in devices:
            raise GpuQueryError(f"{VISIBLE_DEVICES} = '{variable}': names {name} twice; each GPU is for one process")
        devices.append(name)
    return tuple(devices)
