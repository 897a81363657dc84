"""vLLM's layerwise reload, made to fail where it would be silently wrong.

A reload puts each module's tensors on the meta device, gathers the loader calls until a module has all its elements, then runs
them and copies the result into the tensors that the kernels read. Left alone, it

- leaves the old weights in a module that got nothing (a warning), and in the packed copy of a tied output layer (nothing),
- finishes a module that got only a part with whatever memory held (a debug line),
- continues to count where an interrupted update had stopped, and
- on a CPU leaves the experts of a reloaded layer unpacked while the kernel reads them as packed.

Written against vLLM 0.30.0 (`versions.py`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from megatron_rl.errors import RunError


class IncompleteUpdateError(RunError):
    """Parameters that the update did not reach, or reached only in part; `problems` names them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"the update leaves {len(self.problems)} parameters without their new values: {'; '.join(self.problems)}. Send "
            "every tensor of the model under its Hugging Face name"
        )


class RefusedWeightError(RunError):
    """A tensor that the model does not have, that its loader ignores, or that has the wrong shape."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"weight {name!r} was refused by the model's loader: {reason}")


class LayerwiseReload:
    """One model's reload: `start`, `load` for every tensor, `finish`; `abort` at any point makes the next `start` valid.

    After an abort the model holds a mixture of old and new weights. It must not run before a later reload has finished.
    """

    def __init__(self, model: Any) -> None:  # vLLM's model: a torch module with load_weights
        self._model = model
        self._loaded: set[str] = set()
        self._tied = _modules_with_borrowed_parameters(model)  # found now: during a reload each module has its own tensors

    def start(self) -> None:
        """Begin. `vllm.config.set_current_vllm_config` must be active here, and in `load` and `finish`."""
        self.abort()  # what an earlier update left would count as loaded
        initialize_layerwise_reload(self._model)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Hand over one tensor. vLLM keeps a reference until the module is complete: the caller must not overwrite it."""
        try:
            loaded = self._model.load_weights([(name, tensor)])
        except Exception as error:  # vLLM's loaders raise anything from KeyError to AssertionError on a tensor that does not fit
            raise RefusedWeightError(name, f"{type(error).__name__}: {error}") from error
        if not loaded:
            raise RefusedWeightError(name, "it ignores a tensor of this name; leave it out of the update")
        self._loaded.update(loaded)

    def finish(self, model_config: object) -> None:
        """Complete the reload; IncompleteUpdateError, before anything is finalized, when a parameter did not get its values."""
        own = [(path, module) for path, module in self._model.named_modules() if module not in self._tied]
        problems = [problem for path, module in own for problem in _missing(path, module)] + self._missing_uncounted()
        if problems:
            raise IncompleteUpdateError(problems)
        finalize_layerwise_reload(self._model, model_config)
        for module in self._tied:
            # It got no tensor, so the reload did not process it; a CPU kernel would continue to read its packed copy.
            module.quant_method.process_weights_after_loading(module)
        self._loaded.clear()

    def abort(self) -> None:
        """Restore the former tensors of every unfinished module and forget what it had received."""
        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
            info.reset()
        self._loaded.clear()

    def _missing_uncounted(self) -> list[str]:
        """Parameters that vLLM loads at once and does not count (a router's selection bias)."""
        uncounted = [name for name, _ in self._model.named_parameters() if name.rpartition(".")[2] in SKIP_LOAD_TENSORS]
        return [f"{name} was not sent" for name in uncounted if name not in self._loaded]


def _modules_with_borrowed_parameters(model: torch.nn.Module) -> list[Any]:
    """Modules whose parameters all belong to an earlier module as well: an output layer tied to the embedding."""
    seen: set[int] = set()
    borrowers: list[Any] = []
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if own and own <= seen:
            borrowers.append(module)
        seen |= own
    return borrowers


def _missing(path: str, module: torch.nn.Module) -> list[str]:
    """What one module still waits for. Padding never arrives, so where vLLM pads, the loader's calls are looked at instead."""
    info = get_layerwise_info(module)
    if not info.can_load() or info.load_numel >= info.load_numel_total:
        return []  # complete: no name is sent twice, so all its elements came once
    if not any(True for _ in module.parameters(recurse=False)):
        return []  # only buffers (a rotary table, for example), which no checkpoint holds
    if info.load_numel == 0:
        return [f"{path} got nothing"]
    if isinstance(module, VocabParallelEmbedding):
        return []  # one tensor fills it up to the padding
    if isinstance(module, RoutedExperts):
        return _missing_experts(path, module)
    return [f"{path} got {info.load_numel} of {info.load_numel_total} elements"]


def _missing_experts(path: str, experts: RoutedExperts) -> list[str]:
    """The (expert, projection) pairs of a padded expert layer that got no tensor."""
    calls = get_layerwise_info(experts).loaded_weights
    got = {(call.arguments["expert_id"], call.arguments["shard_id"]) for _, call in calls}
    projections = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return [
        f"{path}.{expert}.{name} was not sent"
        for expert in range(experts.global_num_experts)
        for shard, name in projections.items()
        if (expert, shard) not in got and experts._map_global_expert_id_to_local_expert_id(expert) != -1
    ]


def pack_experts_on_reload() -> None:
    """Make a CPU server pack reloaded expert weights into the layout that its kernel reads.

    vLLM packs them at the first load only, so after a reload the kernel reads plain weights as packed ones: log-probs off by 5 to
    7, and no error. Packing has to happen inside the layer's own reload: afterwards is too late where vLLM pads the experts, and
    packs a second time what the reload did not touch.
    """
    original = UnquantizedFusedMoEMethod._setup_kernel
    if getattr(original, "packs_on_reload", False):
        return
    UnquantizedFusedMoEMethod._setup_kernel = _packing(original)


def _packing(setup_kernel: Callable) -> Callable:
    def setup_and_pack(method: UnquantizedFusedMoEMethod, layer: RoutedExperts, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_reload = method.moe_kernel is not None
        setup_kernel(method, layer, w13, w2)
        if is_reload and method.unquantized_backend.name == "CPU":
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_and_pack.packs_on_reload = True  # type: ignore[attr-defined]  # functions take attributes
    return setup_and_pack
