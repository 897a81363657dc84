"""Exact number of elements that one rank holds, from the family's table.

No model is built, and counting is fast enough for a search.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from megatron_rl.topology import Layout, LayoutError
from megatron_rl.weight_mapping import LOCAL, Region, Role, family_of
from megatron_rl.weight_mapping.rules import MappingRule

PARAMETER_ALIGNMENT = 64
"""Megatron's buffers begin each parameter at a multiple of this many elements."""
BUFFER_ALIGNMENT = 128
"""Megatron's buffers (buckets) end at a multiple of this many elements and of the number of ranks that share the buffer."""


@dataclass(frozen=True)
class Held:
    """Elements of some parameters on one rank."""

    trained: int = 0
    aligned: int = 0
    """Of the trained parameters, with the padding of each in Megatron's buffer."""
    matrices: int = 0
    """Of the trained parameters, those in matrices that Muon orthogonalises and NVFP4 quantises."""
    untrained: int = 0
    """fp32 buffers that are no parameters: the routers' selection biases."""
    largest: int = 0
    """Of the largest single parameter."""

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.trained + other.trained,
            self.aligned + other.aligned,
            self.matrices + other.matrices,
            self.untrained + other.untrained,
            max(self.largest, other.largest),
        )

    def times(self, count: int) -> "Held":
        """Elements of `count` equal parameters."""
        return Held(
            count * self.trained, count * self.aligned, count * self.matrices, count * self.untrained, largest=self.largest
        )


@dataclass(frozen=True)
class ChunkElements:
    """Elements of one virtual chunk of a rank: Megatron's dense and expert buffer, and the tied embedding in its own bucket."""

    dense: Held
    expert: Held
    tied: Held

    def buffer_sizes(self, layout: Layout) -> tuple[int, int]:
        """Elements of the dense and of the experts' buffer, including padding."""
        dense = sum(_bucket(held.aligned, layout.dp * layout.cp) for held in (self.dense, self.tied))
        return dense, _bucket(self.expert.aligned, layout.edp)


def _bucket(aligned: int, sharers: int) -> int:
    multiple = math.lcm(sharers, BUFFER_ALIGNMENT)
    return -(-aligned // multiple) * multiple


class ParameterCounts:
    """Numbers of elements of one model at any layout. Methods raise LayoutError if the layout cannot shard a parameter."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self._family = family_of(hf_config)
        self.architecture = self._family.architecture(hf_config)
        self.chunk = lru_cache(maxsize=None)(self._chunk)
        self.buffer_sizes = lru_cache(maxsize=None)(self._buffer_sizes)
        self._layers = lru_cache(maxsize=None)(self._layers_of)
        self._largest = lru_cache(maxsize=None)(self._largest_of)

    def _chunk(self, layout: Layout, stage: int, chunk: int) -> ChunkElements:
        """Elements of one chunk on any rank of a stage; all ranks of a stage hold equally many."""
        layers, first, last = self._layers(layout.tp, layout.ep, layout.etp)
        own = layout.layers_of_chunk(self.architecture.num_layers, stage, chunk)
        sums = layers[own.stop] - layers[own.start]
        dense, expert = (
            Held(int(part[0]), int(part[1]), int(part[2]), int(part[3]), largest)
            for part, largest in zip(sums.reshape(2, 4), self._largest(layout.tp, layout.etp), strict=True)
        )
        tied, is_tied = Held(), self.architecture.tie_word_embeddings and layout.pp > 1
        if stage == 0 and chunk == 0:
            tied, dense = (first, dense) if is_tied else (tied, dense + first)
        if stage == layout.pp - 1 and chunk == layout.vpp - 1:
            dense, tied = dense + last, first if is_tied else tied
        return ChunkElements(dense, expert, tied)

    def _buffer_sizes(self, layout: Layout, stage: int) -> tuple[int, int]:
        """Elements of Megatron's dense and expert buffers, summed over the chunks of a stage."""
        sizes = [self.chunk(layout, stage, chunk).buffer_sizes(layout) for chunk in range(layout.vpp)]
        return sum(dense for dense, _ in sizes), sum(expert for _, expert in sizes)

    def _largest_of(self, tp: int, etp: int) -> tuple[int, int]:
        rules = self._rules(tp)
        dense = [_shard(rule, tp) for rule in rules if rule.region is Region.LAYER and rule.num_experts is None]
        expert = [_shard(rule, etp) for rule in rules if rule.num_experts is not None]
        return max(dense, default=0), max(expert, default=0)

    @cache  # noqa: B019 - counts live as long as their process
    def _rules(self, tp: int) -> tuple[MappingRule, ...]:
        padded = Layout(world_size=tp, tp=tp).padded_vocab_size(self.architecture.vocab_size)
        return tuple(self._family.rules(self.architecture, padded, LOCAL))

    def _layers_of(self, tp: int, ep: int, etp: int) -> tuple[np.ndarray, Held, Held]:
        """Cumulative sums over the layers, int64 [num_layers + 1, 8]; elements before the first and after the last layer."""
        per_layer = np.zeros((self.architecture.num_layers + 1, 2, 4), dtype=np.int64)
        outside = {Region.FIRST: Held(), Region.LAST: Held()}
        for rule in self._rules(tp):
            held = held_of(rule, etp if rule.num_experts is not None else tp, ep)
            if rule.region is Region.LAYER:
                values = (held.trained, held.aligned, held.matrices, held.untrained)
                per_layer[np.asarray(rule.layers, dtype=int) + 1, int(rule.num_experts is not None)] += values
            else:
                outside[rule.region] = outside[rule.region] + held
        return per_layer.reshape(-1, 8).cumsum(axis=0), outside[Region.FIRST], outside[Region.LAST]

    def full_layers(self, role_filter: Iterable[Role]) -> Sequence[int]:
        """Elements of each unsharded layer.

        Args:
            role_filter: Roles of the parameters to count.

        Returns:
            One number per layer.
        """
        roles, sums = set(role_filter), [0] * self.architecture.num_layers
        for rule in self._rules(1):
            for layer in rule.layers if rule.role in roles else ():
                sums[layer] += math.prod(rule.mapping.shape) * (rule.num_experts or 1)
        return sums

    @property
    def num_parameters(self) -> int:
        """Trained elements of the full model, as ParameterTable.num_parameters."""
        return sum(
            math.prod(shape) * (len(rule.layers) if rule.region is Region.LAYER else 1) * (rule.num_experts or 1)
            for rule in self._rules(1)
            if rule.role is not Role.SELECTION_BIAS
            for shape in rule.mapping.part_shapes
        )


def _shard(rule: MappingRule, size: int) -> int:
    return math.prod(rule.mapping.sharding.shard_shape(rule.mapping.shape, size))


def held_of(rule: MappingRule, size: int, ep: int) -> Held:
    """Elements of one rule's parameters in one layer on one rank.

    Args:
        rule: The rule.
        size: Tensor-parallel ranks, or expert-tensor-parallel ranks for experts.
        ep: Expert-parallel ranks.

    Returns:
        The elements.

    Raises:
        LayoutError: The sizes do not divide the parameter or the number of experts.
    """
    rule.mapping.check_size(size)
    if rule.num_experts is not None and rule.num_experts % ep:
        raise LayoutError(f"num_experts = {rule.num_experts} is not a multiple of ep = {ep}")
    shard = _shard(rule, size)
    if rule.role is Role.SELECTION_BIAS:
        return Held(untrained=shard)
    aligned = -(-shard // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
    one = Held(shard, aligned, shard if rule.role.has_matrices else 0, 0, shard)
    return one.times(rule.num_experts // ep if rule.num_experts is not None else 1)
