"""Native fp4 training through Transformer Engine's own Python, and what its reference quantiser makes of the kept matrices.

A program of its own, because it replaces Transformer Engine's native extension for the whole process:

    python -m scripts.contracts.te_fp4 TE_TORCH_SOURCE    the libraries and the repository on PYTHONPATH

Prints JSON. Megatron's linear layers over Transformer Engine's run with the settings that the program gives to
TransformerConfig, in the context that a layer of Megatron opens, and compute what this project's quantiser says: to the bit, but
for the rounding of a sum. That a GPU's kernels do so, too, is not shown.
"""

import base64
import json
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.sections import Precision
from megatron_rl.precision import amax_of, fake_quantise

from . import native_fp4 as standin
from .nvfp4_matrices import fused, matrices
from .te_models import import_transformer_engine, stand_in_for_cuda

TOKENS, INPUTS, OUTPUTS, EXPERTS = 64, 64, 48, 2
AMAX, ROOM = 8.0, 1.25
"""precision.activation_amax; a weight's group has an amax this much above the weight's own."""
WITH_SUBNORMAL_SCALES = 2.0**-15
"""Inputs of this size have block scales that are subnormal in E4M3."""
KINDS = ("column", "norm and column", "row", "experts")
OUTPUT, GRADIENT = 2.0**-8, 2.0**-7
"""Bounds of a difference, relative to the largest value. Results are rounded to bf16, which is 2^-9; for gradients Transformer
Engine's dequantised values are, too, after a product in another order."""


def packed_text(tensor: Tensor) -> str:
    """The bytes of a tensor, compressed, as text."""
    return base64.b85encode(zlib.compress(tensor.contiguous().view(torch.uint8).numpy().tobytes(), 9)).decode()


def reference() -> dict[str, dict[str, str]]:
    """Packed values and block scales by Transformer Engine's reference quantiser; what is fused shares one amax."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    found = {}
    for name, matrix in {**matrices(), **{name: torch.cat(parts) for name, parts in fused().items()}}.items():
        for shape in ((1, 16), (16, 16)):
            if shape == (16, 16) and name != "normal":
                continue
            result = NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, columnwise=False, quant_tile_shape=shape).quantize(matrix)
            key = name if shape == (1, 16) else f"{name}, 16 x 16"
            found[key] = {"packed": packed_text(result.data), "block_scales": packed_text(result.scale)}
    return found


@contextmanager
def megatron(section: Precision, rank: int = 0, store: str = "") -> Iterator[Any]:
    """Megatron's configuration with the settings of native training, and the context that a layer opens for its modules.

    Args:
        section: The settings.
        rank: This process's, of one; of two tensor-parallel ones if they have a store.
        store: A file that both ranks know.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fp4_utils import get_fp4_context
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_rl.engine.native_fp4 import native_fp4_settings

    config = TransformerConfig(
        num_layers=1, hidden_size=INPUTS, num_attention_heads=2, bf16=True, params_dtype=torch.bfloat16, normalization="RMSNorm",
        layernorm_epsilon=standin.NORM_EPSILON, add_bias_linear=False, perform_initialization=False, use_cpu_initialization=True,
        num_moe_experts=EXPERTS, gradient_accumulation_fusion=False, tensor_model_parallel_size=2 if store else 1,
        sequence_parallel=bool(store),
        **native_fp4_settings(section, has_transformer_engine=True),
    )  # fmt: skip
    ranks = 2 if store else 1
    dist.init_process_group("gloo", store=dist.FileStore(store, 2) if store else dist.HashStore(), rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield config, lambda: get_fp4_context(config, 0)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def layers(config: Any, names: tuple[str, ...] = KINDS) -> dict[str, torch.nn.Module]:
    """The kinds of linear layers that Megatron builds of Transformer Engine."""
    from megatron.core.extensions import transformer_engine as layers_of

    ranks = config.tensor_model_parallel_size

    common = {"config": config, "init_method": lambda _: None, "bias": False, "skip_bias_add": True, "is_expert": False}
    columns = {"output_size": OUTPUTS * ranks, "gather_output": False}
    make = {
        "column": lambda: layers_of.TEColumnParallelLinear(INPUTS, **columns, **common),
        "norm and column": lambda: layers_of.TELayerNormColumnParallelLinear(INPUTS, **columns, **common),
        "row": lambda: layers_of.TERowParallelLinear(INPUTS, OUTPUTS, input_is_parallel=True, **common),
        "experts": lambda: layers_of.TEColumnParallelGroupedLinear(EXPERTS, INPUTS, OUTPUTS, **{**common, "is_expert": True}),
    }
    return {name: make[name]() for name in names}


class Case:
    """One layer's inputs and what is expected of it."""

    def __init__(self, name: str, layer: torch.nn.Module, generator: torch.Generator) -> None:
        self.name, self.layer = name, layer
        self.weights = [layer.weight] if name != "experts" else [getattr(layer, f"weight{n}") for n in range(EXPERTS)]
        self.splits = [TOKENS] if name != "experts" else [16, TOKENS - 16]
        self.inputs = torch.randn(TOKENS, 1, INPUTS, generator=generator)
        self.inputs[: TOKENS // 2, :, : INPUTS // 2] *= WITH_SUBNORMAL_SCALES
        self.inputs = self.inputs.to(torch.bfloat16).requires_grad_()
        self.gradient = torch.randn(TOKENS, 1, layer.out_features, generator=generator).to(torch.bfloat16)
        self.new_weights(generator)

    def new_weights(self, generator: torch.Generator) -> None:
        """As after an optimizer step; Megatron then marks the first microbatch."""
        for weight in self.weights:
            weight.grad = None
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
            weight.nvfp4_amax = (amax_of(weight) * ROOM).reshape(1)
        self.layer.is_first_microbatch = True

    def run(self) -> dict[str, Tensor]:
        """Output and gradients of a pass."""
        for weight in self.weights:
            weight.grad = None
        self.inputs.grad = None
        given = self.inputs.flatten(0, 1) if self.name == "experts" else self.inputs
        output, _ = self.layer(given, self.splits) if self.name == "experts" else self.layer(given)
        output.backward(self.gradient.view_as(output))
        found = {"output": output.detach(), "inputs": self.inputs.grad}
        return found | {f"weight {n}": weight.grad for n, weight in enumerate(self.weights)}

    def expected(self, *, quantised: bool) -> dict[str, Tensor]:
        """The same by this project's functions: products in fp32 of values in bf16, which is their exact dtype only in FP4."""
        leaf = self.inputs.detach().requires_grad_()
        rows = leaf.flatten(0, 1)
        rows = _normed(self, rows)
        values = rows.detach()
        weights = [weight.detach() for weight in self.weights]
        if quantised:
            exact = (
                fake_quantise(values.float(), torch.tensor(AMAX)),
                [fake_quantise(w.float(), p.nvfp4_amax[0]) for w, p in zip(weights, self.weights, strict=True)],
            )
            values = fake_quantise(values, torch.tensor(AMAX))
            weights = [fake_quantise(w, p.nvfp4_amax[0]) for w, p in zip(weights, self.weights, strict=True)]
        else:
            exact = values.float(), [w.float() for w in weights]
        gradients = self.gradient.flatten(0, 1).float().split(self.splits)
        output = torch.cat([x @ w.t() for x, w in zip(exact[0].split(self.splits), exact[1], strict=True)])
        back = torch.cat([g @ w.float() for g, w in zip(gradients, weights, strict=True)]).to(torch.bfloat16)
        rows.backward(back)
        products = [g.t() @ x.float() for g, x in zip(gradients, values.split(self.splits), strict=True)]
        return {"output": output, "inputs": leaf.grad} | {f"weight {n}": product for n, product in enumerate(products)}


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value: bf16 rounds to 2^-9."""
    return float((found.float().flatten() - wanted.float().flatten()).abs().max() / wanted.abs().max())


def problems_of(case: Case, *, quantised: bool) -> list[str]:
    """Where a pass computes something else."""
    standin.PRODUCTS.clear()
    found, wanted = case.run(), case.expected(quantised=quantised)
    return [
        f"{case.name}: {name} is {distance(found[name], wanted[name]):.2g} off"
        for name in wanted
        if distance(found[name], wanted[name]) > (OUTPUT if name == "output" else GRADIENT)
    ]


def native_training() -> tuple[dict[str, list[str]], list[str]]:
    """The products of each layer's pass, and what is other than expected."""
    from megatron_rl.engine.native_fp4 import leave_in_full_precision

    section = Precision(training="native", rollouts="nvfp4", activations="nvfp4", activation_amax=AMAX)
    generator, facts, problems = torch.Generator().manual_seed(0), {}, []
    with megatron(section) as (config, context):
        for name, layer in layers(config).items():
            case = Case(name, layer, generator)
            with context():
                problems += problems_of(case, quantised=True)
                facts[name] = [" ".join(product) for product in standin.PRODUCTS]
                kept = layer.quantizers["scaling_fwd"][0]
            with context():  # another recipe, equal to the first
                problems += [f"{name}, second microbatch: {line}" for line in problems_of(case, quantised=True)]
            if layer.quantizers["scaling_fwd"][0] is not kept:
                problems.append(f"{name}: its quantisers are made anew for each microbatch")
            case.new_weights(generator)
            with context():
                problems += [f"{name}, next step: {line}" for line in problems_of(case, quantised=True)]
            with context(), torch.no_grad():
                before = case.layer(*((case.inputs.flatten(0, 1), case.splits) if name == "experts" else (case.inputs,)))[0]
            if distance(before, case.expected(quantised=True)["output"]) > OUTPUT:
                problems.append(f"{name}: without gradients the output differs")
            leave_in_full_precision([layer], [])
            with context():
                problems += [f"{name}, left out: {line}" for line in problems_of(case, quantised=False)]
            if {kind for kind, _ in standin.PRODUCTS} != {"full"}:
                problems.append(f"{name}: left out, and quantised")
    return facts, problems


def gathered_inputs() -> list[str]:
    """What two ranks with sequence parallelism compute otherwise than one rank with all tokens.

    Each rank has half of the tokens and half of the outputs. Inputs are so small that rounding them twice, as Transformer Engine
    does with any other quantiser, would show.
    """
    section = Precision(training="native", rollouts="nvfp4", activations="nvfp4", activation_amax=AMAX)
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        child = os.fork()
        if not child:
            status = 1
            try:
                status = int(bool(_rank_of_two(1, store, section)))
            finally:
                os._exit(status)  # nothing of the parent's is to be ended twice
        try:
            problems = _rank_of_two(0, store, section)
        except BaseException:
            os.kill(child, signal.SIGKILL)  # it waits for this rank
            raise
        finally:
            _, status = os.waitpid(child, 0)
    return problems + (["sequence parallelism: rank 1 has other values"] if status else [])


def _rank_of_two(rank: int, store: str, section: Precision) -> list[str]:
    problems = []
    with megatron(section, rank, store) as (config, context):
        generator = torch.Generator().manual_seed(1)
        for name, layer in layers(config, ("column", "norm and column")).items():
            case = Case(name, layer, generator)
            full = torch.randn(TOKENS, 1, INPUTS, generator=generator) * (1.0 if "norm" in name else WITH_SUBNORMAL_SCALES)
            case.inputs = full.to(torch.bfloat16).requires_grad_()
            if "norm" in name:
                layer.layer_norm_weight.data.fill_(WITH_SUBNORMAL_SCALES)
            wanted = case.expected(quantised=True)
            rows = fake_quantise(_normed(case, case.inputs.detach().flatten(0, 1)), torch.tensor(AMAX))
            twice = fake_quantise(rows, torch.tensor(AMAX))
            assert not torch.equal(rows, twice), "rounding twice would not show"
            part = TOKENS // 2
            case.inputs = case.inputs.detach()[rank * part : (rank + 1) * part].clone().requires_grad_()
            with context():
                found = case.run()
            problems += [
                f"{name}, sequence parallelism: {key} is {distance(found[key], wanted[key]):.2g} off"
                for key, bound in (("output", OUTPUT), ("weight 0", GRADIENT))
                if distance(found[key], wanted[key]) > bound
            ]
    return problems


def _normed(case: Case, rows: Tensor) -> Tensor:
    return standin.rms_norm(rows, case.layer.layer_norm_weight.detach()) if case.name == "norm and column" else rows


def main() -> None:
    """Everything."""
    import_transformer_engine(Path(sys.argv[1]))
    stand_in_for_cuda()
    standin.install()
    problems = gathered_inputs()  # first: it forks, which a process with Gloo's threads cannot
    products, others = native_training()
    print(json.dumps({"reference": reference(), "products": products, "problems": problems + others}))


if __name__ == "__main__":
    main()
