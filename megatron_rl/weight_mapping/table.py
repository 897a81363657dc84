"""The one table of a model's parameters, by Megatron's or Hugging Face's names; and the family of a config."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch

from megatron_rl.weight_mapping.architecture import ModelArchitecture
from megatron_rl.weight_mapping.deepseek_v3 import DeepseekV3, KimiK2
from megatron_rl.weight_mapping.errors import TensorMismatchError, UnknownFamilyError, nearest
from megatron_rl.weight_mapping.family import Family
from megatron_rl.weight_mapping.glm4_moe import Glm4Moe
from megatron_rl.weight_mapping.gpt_oss import GptOss
from megatron_rl.weight_mapping.llama import Llama
from megatron_rl.weight_mapping.mixtral import Mixtral
from megatron_rl.weight_mapping.mtp_rules import mtp_copies
from megatron_rl.weight_mapping.naming import LOCAL, NamingScheme
from megatron_rl.weight_mapping.parameter import Parameter, Role
from megatron_rl.weight_mapping.qwen3 import Qwen3, Qwen3Moe
from megatron_rl.wire.tensor_spec import TensorSpec, dtype_name

_FAMILIES = (Llama(), Qwen3(), Qwen3Moe(), Mixtral(), DeepseekV3(), KimiK2(), Glm4Moe(), GptOss())

FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""Families by `model_type`. A new family is entered here."""


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by `model_type` or else by `architectures`.

    Raises:
        UnknownFamilyError: None of this package; the message lists the known ones.
    """
    model_type, heads = hf_config.get("model_type"), hf_config.get("architectures") or []
    by_head = {family.causal_lm: family for family in reversed(FAMILIES.values())}
    family = FAMILIES.get(model_type) if model_type else next((by_head[head] for head in heads if head in by_head), None)
    if family is None or (heads and family.causal_lm not in heads):
        known = ", ".join(f"{family.model_type} ({family.causal_lm})" for family in FAMILIES.values())
        raise UnknownFamilyError(
            f"model_type {model_type!r} with architectures {heads} is not a known model family; known are: {known}. "
            "To add a family, write a class with its mapping rules in megatron_rl/weight_mapping"
        )
    return family


class ParameterTable:
    """All parameters of one model.

    Args:
        hf_config: config.json of the model.
        padded_vocab_size: Rows of Megatron's embedding and output layer (topology.Layout.padded_vocab_size); None: no padding.
        naming: How Megatron names the parameters.
        with_mtp: Include the MTP layers: to convert them, or to train them.

    Raises:
        UnknownFamilyError: No family of this package has the config's model_type.
        UnsupportedArchitectureError: The config asks for something that cannot be expressed.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        padded_vocab_size: int | None = None,
        naming: NamingScheme = LOCAL,
        with_mtp: bool = False,
    ) -> None:
        family = family_of(hf_config)
        self.architecture: ModelArchitecture = family.architecture(hf_config)
        self.with_mtp = with_mtp and self.architecture.num_mtp_layers > 0
        mtp = family.mtp_parameters(self.architecture, naming) if self.architecture.num_mtp_layers else []
        own = family.parameters(self.architecture, padded_vocab_size, naming)
        self.parameters: tuple[Parameter, ...] = (*own, *(mtp if self.with_mtp else []))
        self._mtp_names = {tensor.name for parameter in mtp for tensor in parameter.hf}
        self._by_name: dict[str, Parameter] = {parameter.name: parameter for parameter in self.parameters}
        self._by_hf_name: dict[str, list[Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            for tensor in parameter.hf:
                self._by_hf_name[tensor.name].append(parameter)

    def __getitem__(self, megatron_name: str) -> Parameter:
        """The parameter with this Megatron name, with global layer and expert numbers.

        Raises:
            TensorMismatchError: There is none; the message has the nearest names.
        """
        if megatron_name not in self._by_name:
            raise TensorMismatchError(
                f"{megatron_name!r} is not a parameter of this {self.architecture.model_type}"
                f"{nearest(megatron_name, self._by_name)}"
            )
        return self._by_name[megatron_name]

    def by_hf_name(self, hf_name: str) -> list[Parameter]:
        """The parameters that fill a Hugging Face tensor: one, or all experts of a layer in order.

        Raises:
            TensorMismatchError: There is none; the message has the nearest names.
        """
        if hf_name not in self._by_hf_name:
            raise TensorMismatchError(
                f"{hf_name!r} is not a tensor of this {self.architecture.model_type}{nearest(hf_name, self._by_hf_name)}"
            )
        return self._by_hf_name[hf_name]

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint by name, in the order of the parameters; a tied output layer is not among them."""
        return {slot.name: slot.shape for parameter in self.parameters for slot in parameter.hf}

    def hf_specs(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The same tensors as a checkpoint in `dtype` has them: selection biases stay in fp32."""
        return {
            slot.name: TensorSpec(slot.name, slot.shape, dtype_name(slot.dtype or dtype))
            for parameter in self.parameters
            for slot in parameter.hf
        }

    @property
    def tied(self) -> dict[str, str]:
        """Names under which a checkpoint may repeat another tensor: {"lm_head.weight": "model.embed_tokens.weight"}."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.architecture.tie_word_embeddings else self.mtp_copies

    @property
    def mtp_copies(self) -> dict[str, str]:
        """The entries of `tied` that are in MTP layers."""
        return mtp_copies(self.architecture) if self.with_mtp else {}

    @property
    def mtp_names(self) -> set[str]:
        """Hugging Face names of all tensors of the MTP layers, whether or not the table includes them."""
        return self._mtp_names | mtp_copies(self.architecture).keys()

    @property
    def optional_names(self) -> set[str]:
        """Tensors that a checkpoint may hold in addition to the table's."""
        return set() if self.with_mtp else self.mtp_names

    @property
    def num_parameters(self) -> int:
        """Elements that are trained: without padding and selection biases (buffers), tied embeddings once."""
        trained = (parameter for parameter in self.parameters if parameter.role is not Role.SELECTION_BIAS)
        return sum(prod(tensor.part_shape) for parameter in trained for tensor in parameter.hf)

    @property
    def num_active_parameters(self) -> int:
        """Elements that take part in one token: of the experts, only those that it is routed to."""
        moe = self.architecture.moe
        experts = sum(prod(t.part_shape) for p in self.parameters if p.is_expert for t in p.hf)
        return self.num_parameters - (experts - experts * moe.top_k // moe.num_experts if moe else 0)
