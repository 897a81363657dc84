"""Mapping rules of a model family, and their expansion into the parameters of a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.weight_mapping.architecture import ModelArchitecture
from megatron_rl.weight_mapping.param_mappings import DirectMapping, ParamMapping, VocabularyMapping
from megatron_rl.weight_mapping.parameter import HfSlot, Parameter, Region, Role

HF_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class MappingRule:
    """The parameters of one name pattern: Megatron's name, the Hugging Face names, how tensors map, and where they occur."""

    megatron: str
    """Megatron's name, with {layer} and {expert} as placeholders."""
    hf: tuple[str, ...]
    """Hugging Face names, one for each of the mapping's `hf_shapes`; the same placeholders."""
    mapping: ParamMapping
    role: Role
    region: Region = Region.LAYER
    layers: Sequence[int] = ()
    """Layers that have it (region LAYER)."""
    num_experts: int | None = None
    """Given: one parameter for each expert of each layer. Hugging Face names without {expert} hold all experts of a layer."""
    dtype: torch.dtype | None = None
    """Given: kept in this dtype whatever the model's is."""
    scale_shared_with: str | None = None
    """Megatron's name in the rule whose quantisation group it joins."""

    def parameters(self, layer: int | None) -> Iterator[Parameter]:
        """Its parameters in one layer (None: outside of the layers)."""
        experts: Sequence[int | None] = [None] if self.num_experts is None else range(self.num_experts)
        for expert in experts:
            pairs = zip(self.hf, self.mapping.hf_shapes, strict=True)
            slots = tuple(self._slot(name, shape, layer, expert) for name, shape in pairs)
            yield Parameter(
                self.megatron,
                slots,
                self.mapping,
                self.role,
                self.region,
                layer,
                expert,
                scale_shared_with=self.scale_shared_with,
            )

    def _slot(self, name: str, shape: tuple[int, ...], layer: int | None, expert: int | None) -> HfSlot:
        if expert is None or self.num_experts is None or "{expert}" in name:
            return HfSlot(name.format(layer=layer, expert=expert), shape, self.dtype)
        return HfSlot(name.format(layer=layer), (self.num_experts, *shape), self.dtype, index=expert)


def expand(rules: Sequence[MappingRule], num_layers: int) -> list[Parameter]:
    """All parameters in the order of the forward pass: the order in which checkpoints and updates are streamed."""
    by_layer: list[list[MappingRule]] = [[] for _ in range(num_layers)]
    for rule in rules:
        for layer in rule.layers:
            by_layer[layer].append(rule)
    outside = {region: [rule for rule in rules if rule.region is region] for region in (Region.FIRST, Region.LAST)}
    first = [parameter for rule in outside[Region.FIRST] for parameter in rule.parameters(None)]
    middle = [parameter for layer, found in enumerate(by_layer) for rule in found for parameter in rule.parameters(layer)]
    last = [parameter for rule in outside[Region.LAST] for parameter in rule.parameters(None)]
    return first + middle + last


def vocabulary_rules(model: ModelArchitecture, padded_vocab_size: int) -> list[MappingRule]:
    """Embedding, final norm, and an output layer unless it is the embedding."""
    mapping = VocabularyMapping(model.vocab_size, padded_vocab_size, model.hidden_size)
    norm = DirectMapping((model.hidden_size,))
    rules = [
        MappingRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), mapping, Role.EMBEDDING, Region.FIRST),
        MappingRule("decoder.final_layernorm.weight", ("model.norm.weight",), norm, Role.NORM, Region.LAST),
    ]
    if not model.tie_word_embeddings:
        rules.append(MappingRule("output_layer.weight", ("lm_head.weight",), mapping, Role.OUTPUT, Region.LAST))
    return rules
