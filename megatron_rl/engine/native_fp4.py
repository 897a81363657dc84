"""precision.training = "native": Transformer Engine's FP4 products of the values that the servers hold.

Megatron-Core 0.19.2 takes a quantiser factory (`fp4_recipe = "custom"`) by its import path; its own recipe "nvfp4" is always
Transformer Engine's default one, and its recipes per module (`quant_recipe`) match names that the layers of a GPTModel do not
have.
Hence:

- the path names `Fp4Factory` and its settings, see `__getattr__`; te_fp4.py has the quantisers that it gives;
- linear layers that are not selected are set to full precision one by one, after the model is built;
- each pass puts the global scales of full matrices on the parameters, where the weights' quantisers find them.
"""

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from megatron_rl.config.sections import Precision
from megatron_rl.config.tree import changes_fp4
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.megatron_types import megatron_attributes
from megatron_rl.engine.quantisation import FP4_CAPABILITY, PolicyQuantiser
from megatron_rl.precision import Selection, difference_of
from megatron_rl.weight_mapping import HeldParameter

FULL_PRECISION = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
"""Megatron's quantisation of one module: none, whatever the layer's recipe is."""
_NAME = re.compile(r"amax_(?P<bits>[0-9a-f]{16})_backward_(?P<backward>full|nvfp4)")


@dataclass(frozen=True)
class Fp4Factory:
    """Gives Transformer Engine's modules their quantisers.

    Equal factories make equal recipes: Megatron makes a recipe anew for each layer and pass, and a module keeps its quantisers as
    long as the recipe is equal to the last one.
    """

    activation_amax: float
    """See precision.activation_amax."""
    backward: str
    """See precision.backward."""

    @property
    def path(self) -> str:
        """Where Megatron imports it from."""
        return f"{__name__}.amax_{struct.pack('>d', self.activation_amax).hex()}_backward_{self.backward}"

    def __call__(self, role: Any) -> Any:
        """The quantiser for a role, which names the tensor: "input", "weight", "grad_output"; none at a module's borders."""
        from megatron_rl.engine import te_fp4

        return te_fp4.quantiser_for("" if role is None else role.tensor_type, self.activation_amax, self.backward)


def __getattr__(name: str) -> Fp4Factory:
    """The factory of a path."""
    if found := _NAME.fullmatch(name):
        (amax,) = struct.unpack(">d", bytes.fromhex(found["bits"]))
        return Fp4Factory(amax, found["backward"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def native_fp4_settings(section: Precision, *, has_transformer_engine: bool) -> Mapping[str, Any]:
    """Arguments of TransformerConfig for training in fp4.

    Args:
        section: The run's precision section.
        has_transformer_engine: Whether the layers are Transformer Engine's.

    Raises:
        UnsupportedModelError: Megatron would silently train in bf16, or Transformer Engine round otherwise than the servers.
    """
    if section.training != "native":
        return {}
    if not has_transformer_engine:
        raise UnsupportedModelError(
            "precision.training = 'native' needs a Blackwell GPU and Transformer Engine, and this machine does not have both: "
            "without them Megatron would train in bf16; install megatron-rl[gpu] on such a machine, or use 'qat'"
        )
    from transformer_engine.common import recipe

    capability = torch.cuda.get_device_capability()
    if capability < FP4_CAPABILITY or not hasattr(recipe, "CustomRecipe"):
        raise UnsupportedModelError(
            "precision.training = 'native' needs a GPU of compute capability 10.0 or above "
            f"(this one has {capability[0]}.{capability[1]}) and a Transformer Engine with custom recipes (2.20); use 'qat'"
        )
    if found := sorted(name for name in os.environ if changes_fp4(name)):
        raise UnsupportedModelError(
            f"precision.training = 'native' with {', '.join(found)} in the environment: Transformer Engine would round otherwise "
            "than the servers; unset it"
        )
    factory = Fp4Factory(section.activation_amax, section.backward)
    return {"fp4": "e2m1", "fp4_recipe": "custom", "fp4_quantizer_factory": factory.path}


class NativeQuantiser(PolicyQuantiser):
    """Puts each quantised parameter's global scale where Transformer Engine's modules look for it.

    Args:
        selection: Which parameters are quantised.
        parameters: Those that this rank holds, with their tensors.
        device: Device of the tensors.

    Raises:
        UnsupportedModelError: Transformer Engine's kernel gives other bytes than those that the servers get.
    """

    def __init__(self, selection: Selection, parameters: Iterable[tuple[HeldParameter, Tensor]], device: torch.device) -> None:
        from megatron_rl.engine.te_fp4 import TransformerEngineQuantiser

        super().__init__(selection, parameters, device)
        if difference := difference_of(TransformerEngineQuantiser(), device):
            raise UnsupportedModelError(
                "precision.training = 'native': here Transformer Engine's kernel gives other bytes than those that the servers "
                f"get ({difference} of a test matrix differ); use 'qat'"
            )

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Within the block the parameters have their global scales; entering it is a collective."""
        amaxes = self._over_ranks()
        for group, tensor in self._tensors:
            assert isinstance(tensor, torch.nn.Parameter)
            megatron_attributes(tensor).nvfp4_amax = amaxes[group : group + 1]
        yield


def leave_in_full_precision(modules: Iterable[torch.nn.Module], quantised: Iterable[torch.nn.Module]) -> int:
    """Set linear layers of Transformer Engine to full precision.

    Args:
        modules: All modules of the model.
        quantised: Those that keep the layers' recipe.

    Returns:
        Number of the layers that were set.
    """
    from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig

    kept = {id(module) for module in quantised}
    others = [module for module in modules if hasattr(module, "te_quant_params") and id(module) not in kept]
    for module in others:
        config = QuantizationConfig(FULL_PRECISION, MatchContext(type(module).__name__, None), "full precision")
        cast(Any, module).finish_init(config)
    return len(others)
