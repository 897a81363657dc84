"""vLLM's own config parser, model and loaders on an NVFP4 checkpoint, without a GPU: `python -m tests.e2e.nvfp4_in_vllm FOLDER
OUT PORT [UPDATE]`.

Only the choice and preparation of kernels for a device is replaced. Everything else is vLLM's: it reads config.json, decides for
each layer whether it is quantised, makes the parameters, loads the tensors into them and brings global scales into the form that
kernels take. OUT gets, as safetensors: of each quantised linear map MODULE.weight, of each layer of experts MODULE.w13 and
MODULE.w2, dequantised by vLLM from what the kernels would get; and every parameter of the other layers as it is.

With UPDATE, a safetensors file, the model has dummy weights, as a server before its first update, and is given these by vLLM's
layerwise reload, one tensor after the other. Then it must not wait for more of any layer.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.utils import initialize_model

_COMPRESSED = "vllm.model_executor.layers.quantization.compressed_tensors."
compressed_linear = importlib.import_module(_COMPRESSED + "schemes.compressed_tensors_w4a4_nvfp4")
compressed_moe = importlib.import_module(_COMPRESSED + "compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4")


class NoKernel:
    def input_quant_key(self) -> None:
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Weights stay in the checkpoint's order."""


class NoExperts:
    fused_experts = NoKernel()


def leave_kernels_out() -> None:
    for module in (modelopt, compressed_linear):
        module.init_nvfp4_linear_kernel = lambda **_: NoKernel()
    for module in (modelopt, compressed_moe):
        module.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.MARLIN, NoExperts)
        module.convert_to_nvfp4_moe_kernel_format = as_it_is
        module.make_nvfp4_moe_quant_config = lambda **_: None
        module.make_nvfp4_moe_kernel = lambda **_: NoExperts()


def as_it_is(**given: Any) -> tuple[Any, ...]:
    return tuple(
        given[name] for name in ("w13", "w13_scale", "w13_scale_2", "a13_scale", "w2", "w2_scale", "w2_scale_2", "a2_scale")
    )


def loaded_model(folder: str, port: str, update: str | None) -> nn.Module:
    leave_kernels_out()
    arguments = EngineArgs(
        model=folder,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=32,
        kv_cache_memory_bytes=1 << 26,
        load_format="auto" if update is None else "dummy",
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=config)
        for parameter in model.parameters():  # what nothing loads is seen
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else 255)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if (
                method is not None
                and "Unquantized" not in type(method).__name__
                and hasattr(method, "process_weights_after_loading")
            ):
                method.process_weights_after_loading(module)
        if update is not None:
            reload(model, load_file(update), config.model_config)
    return model


def reload(model: nn.Module, tensors: dict[str, Tensor], model_config: Any) -> None:
    """As vLLM's NCCL engine does it."""
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod):
        method.process_weights_after_loading = lambda self, layer: None  # a CPU's own packing
    initialize_layerwise_reload(model)
    for name, tensor in tensors.items():
        assert model.load_weights([(name, tensor)]), name
    for path, module in model.named_modules():
        info = get_layerwise_info(module)
        waits = info.can_load() and bool(list(module.parameters(recurse=False))) and not isinstance(module, Attention)
        assert not waits, f"{path} has {info.load_numel} of {info.load_numel_total} elements"
    finalize_layerwise_reload(model, model_config)


def values(packed: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    return dequantize_to_dtype(packed, scales, global_scale.float(), torch.float32, swizzle=False)


def contents(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    quantised = set()
    for path, module in model.named_modules():
        if getattr(module, "weight_global_scale", None) is not None:
            found[f"{path}.weight"] = values(module.weight.data, module.weight_scale.data, module.weight_global_scale.data)
            for name in ("input_global_scale", "input_global_scale_inv"):
                if getattr(module, name, None) is not None:
                    found[f"{path}.{name}"] = getattr(module, name).data
            quantised.add(path)
        elif getattr(module, "w13_weight_scale", None) is not None:
            for name in ("w13", "w2"):
                packed, scales, scale = (
                    getattr(module, f"{name}_{part}") for part in ("weight", "weight_scale", "weight_scale_2")
                )
                found[f"{path}.{name}"] = torch.stack(
                    [values(*parts) for parts in zip(packed.data, scales.data, scale.data, strict=True)]
                )
                found[f"{path}.{name}_input_scale"] = getattr(module, f"{name}_input_scale").data
            quantised.add(path)
    plain = model.named_parameters()
    return found | {f"plain:{name}": tensor.data for name, tensor in plain if name.rpartition(".")[0] not in quantised}


if __name__ == "__main__":
    folder, out, port, *update = sys.argv[1:]
    with torch.no_grad():
        found = contents(loaded_model(folder, port, *(update or [None])))
        save_file({name: tensor.clone().contiguous() for name, tensor in found.items()}, Path(out))
