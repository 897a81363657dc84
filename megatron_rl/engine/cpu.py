"""The stand-in for CUDA in a process that computes on the CPU, so that Megatron-Core's own code runs on the CPU over Gloo.

Megatron-Core writes `device="cuda"` and `torch.cuda.current_device()` in its source, asks `tensor.type()` for
"torch.cuda.FloatTensor", and synchronises streams. `install()` gives each of these a meaning on the CPU, once in a process.
GPUs and their packages, where the machine has any, are hidden first. Everything that is replaced, and why, is in this file.
"""

import contextlib
import functools
import importlib.metadata
import os
import queue
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor

from megatron_rl.errors import UserError

_CHECKED_VERSIONS = ("0.16.", "0.19.")

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
"""Functions of torch that Megatron calls with a literal device="cuda"."""

_GPU_PACKAGES = (
    "transformer_engine",
    "transformer_engine_torch",
    "apex",
    "amp_C",
    "fused_weight_gradient_mlp_cuda",
    "flash_attn",
    "flash_attn_3",
    "flashattn_hopper",
    "flashinfer",
    "flash_mla",
    "grouped_gemm",
    "deep_ep",
    "mamba_ssm",
    "causal_conv1d",
    "fla",
    "nvidia_resiliency_ext",
    "nvidia_kitchen",
    "torch_memory_saver",
)
"""What Megatron-Core 0.16 and 0.19 import where they can, and whose kernels need a GPU."""


class UnsupportedMegatronError(UserError, RuntimeError):
    """This Megatron-Core was not checked with the stand-in."""


class NullEvent:
    """An event that has always happened: the CPU runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None:
        """Do nothing."""

    def wait(self, *args: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class NullStream:
    """The only stream. A class and no function, since other libraries write `torch.cuda.Stream | None` in annotations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None:
        """Do nothing."""

    def wait_event(self, *args: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def record_event(self, *args: Any) -> NullEvent:
        """An event that has happened."""
        return NullEvent()


@functools.cache
def install() -> None:
    """Choose the CPU for this process and put the stand-in in place; nothing happens the second time.

    To call before CUDA is initialised and before Megatron-Core is imported.

    Raises:
        UnsupportedMegatronError: For a Megatron-Core that it was not checked with.
        RuntimeError: CUDA is initialised, or Megatron-Core has already been imported with Transformer Engine.
    """
    _check_version()
    _hide_gpus()
    _hide_gpu_packages()
    _stand_in_for_torch_cuda()
    _redirect_tensors()
    _run_uncompiled()
    _fix_megatron()


def _check_version() -> None:
    found = importlib.metadata.version("megatron-core")
    if not found.startswith(_CHECKED_VERSIONS):
        checked = " or ".join(version + "x" for version in _CHECKED_VERSIONS)
        raise UnsupportedMegatronError(f"megatron-core {found} was not checked on a CPU; install {checked}, or use a GPU")


def _hide_gpus() -> None:
    if torch.cuda.is_initialized():
        raise RuntimeError("this process has used a GPU already, and cannot compute on the CPU alone")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when CUDA is initialised, which nothing does from here on


def _hide_gpu_packages() -> None:
    """Make the packages unimportable that Megatron-Core takes, where it can import them, without asking for a GPU.

    None in sys.modules has `import` raise ModuleNotFoundError and find_spec return None, as if the package were not installed.
    """
    if sys.modules.get("transformer_engine") is not None and "megatron.core" in sys.modules:
        raise RuntimeError("Megatron-Core has been imported with Transformer Engine, and cannot compute on the CPU")
    for name in _GPU_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]


def _stand_in_for_torch_cuda() -> None:
    """Streams, events, random state and the current device of a machine whose only device is the CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream, cuda.Event = NullStream, NullEvent
    cuda.current_stream = cuda.default_stream = lambda device=None: NullStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    # One generator serves for both: Megatron forks and restores "the CUDA state" around initialisation and recomputation.
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


def _redirect_tensors() -> None:
    """Tensors requested on "cuda" are made on the CPU, and their type's name is that of CUDA tensors.

    The functions are wrapped, which costs a step a tenth of what a TorchFunctionMode over every operator does.
    """
    # `with torch.device(...)` keeps a cache of the factory functions; it must hold the originals, which the wrappers call.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.type = _type_of_cuda(tensor.type)
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, device=None: self
    tensor.record_stream = lambda self, stream: None


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # for copies to a GPU; torch refuses it where there is none
        return factory(*args, **kwargs)

    return wrapped


def _type_of_cuda(type_of: Callable) -> Callable:
    """The optimizer sorts parameters by the names 'torch.cuda.FloatTensor' and 'torch.cuda.BFloat16Tensor'."""

    @functools.wraps(type_of)
    def wrapped(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return wrapped


def _run_uncompiled() -> None:
    """Turn torch.compile off, to which Megatron-Core passes small functions (GPT-OSS's gate, the router's bias).

    On a CPU each rank would start a C++ compiler in the middle of a step, and ranks that share a cache folder would load one
    another's half-written libraries.
    """
    torch.compiler.set_stance("force_eager")


def _fix_megatron() -> None:
    """Fix what Megatron-Core itself gets wrong without a GPU."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # 0.16.1 without Transformer Engine: the router's product asks for a name that was never bound.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # all_to_all takes its split sizes as numbers; Megatron turns the tensors of sizes into such only where they are on a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_host_values
    # A checkpoint keeps the step count of PyTorch's AdamW next to the parameters' states, but loading looks for it among them.
    DistributedOptimizer._set_main_param_and_optimizer_states = _keeps_step(
        DistributedOptimizer._set_main_param_and_optimizer_states
    )
    # Experts sharded over ranks (etp > 1) exchange as many rows as each rank happens to have: Gloo gathers and scatters equal
    # parts only.
    mappings._gather_along_first_dim = _gathers_uneven_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _scatters_uneven_parts(mappings._reduce_scatter_along_first_dim)
    # The results of writing a checkpoint come back through a manager process, a new Python for each rank, which a synchronous
    # save does not need: it takes seconds to start, and imports the main module again.
    filesystem_async._results_queue = queue.Queue()


def _as_host_values(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001 - Megatron's
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _keeps_step(set_states: Callable) -> Callable:
    @functools.wraps(set_states)
    def wrapped(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, model_param, {**{name: value for name, value in state.items() if name == "step"}, **tensors})

    return wrapped


def _gathers_uneven_parts(gather: Callable) -> Callable:
    @functools.wraps(gather)
    def wrapped(
        input_: Tensor, group: dist.ProcessGroup, output_split_sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        copies = input_.repeat(group.size(), *[1] * (input_.dim() - 1))
        return _exchange(copies, [input_.shape[0]] * group.size(), output_split_sizes, group)

    return wrapped


def _scatters_uneven_parts(scatter: Callable) -> Callable:
    @functools.wraps(scatter)
    def wrapped(
        input_: Tensor, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, *args, **kwargs)
        own = input_split_sizes[group.rank()]
        parts = _exchange(input_.contiguous(), input_split_sizes, [own] * group.size(), group)
        return parts.view(group.size(), own, *input_.shape[1:]).sum(0)

    return wrapped


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """sent[r] rows to rank r, received[r] rows from it."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, received, sent, group=group)
    return out
