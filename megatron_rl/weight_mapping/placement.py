"""Which rank holds which parameter, under which name, and which piece of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.topology import Layout, LayoutError, RankCoords
from megatron_rl.weight_mapping.parameter import Parameter, Region
from megatron_rl.weight_mapping.table import ParameterTable

_TIED_OUTPUT = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as one rank holds it."""

    parameter: Parameter
    chunk: int
    """Virtual pipeline chunk: index into the rank's list of model chunks."""
    name: str
    """Megatron's name within that chunk: layer and expert numbers are local."""
    shard_rank: int
    """Rank in the group that the parameter is sharded over."""
    num_shards: int
    is_tied_copy: bool = False
    """The last stage's copy of the embedding, for a tied output layer or for MTP: filled at load, not sent or saved again."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return self.parameter.shard_shape(self.num_shards)

    def shard(self, full: Tensor) -> Tensor:
        """This rank's shard of Megatron's full tensor."""
        return self.parameter.shard(full, self.shard_rank, self.num_shards)

    def shard_from_hf(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's shard, straight from the Hugging Face tensors."""
        return self.parameter.shard_from_hf(tensors, self.shard_rank, self.num_shards)


class Placement:
    """Which rank of a parallelism layout holds which parameters.

    Raises:
        LayoutError: Model and layout do not fit; lists every reason.
    """

    def __init__(self, table: ParameterTable, layout: Layout) -> None:
        self.table, self.layout = table, layout
        self._check()
        self._layers = {
            layer: (stage, chunk, position)
            for stage in range(layout.pp)
            for chunk in range(layout.vpp)
            for position, layer in enumerate(layout.layers_of_chunk(self._num_layers, stage, chunk))
        }

    def held_by(self, rank: int) -> dict[tuple[int, str], HeldParameter]:
        """All parameters of a rank, by (chunk, local name)."""
        coords = self.layout.coords_of(rank)
        held = [self._hold(parameter, coords) for parameter in self.table.parameters if self._is_held(parameter, coords)]
        if self._has_tied_copy(coords):
            embedding = next(parameter for parameter in self.table.parameters if parameter.region is Region.FIRST)
            name = _EMBEDDING if self.table.with_mtp else _TIED_OUTPUT  # Megatron then keeps a complete embedding there
            held.append(HeldParameter(embedding, self.layout.vpp - 1, name, coords.tp, self.layout.tp, True))
        return {(parameter.chunk, parameter.name): parameter for parameter in held}

    def owners(self, parameter: Parameter) -> tuple[int, ...]:
        """Global ranks whose shards, in this order, make up the full tensor: those of the first replica."""
        layout, stage = self.layout, self.stage_of(parameter)
        first = stage * layout.ranks_per_stage
        if not parameter.is_expert:
            return tuple(range(first, first + layout.tp))
        first += self._expert_rank(parameter) * layout.etp
        return tuple(range(first, first + layout.etp))

    def stage_of(self, parameter: Parameter) -> int:
        """Pipeline rank that holds it (of a tied embedding: the first stage)."""
        return self._position(parameter)[0]

    @property
    def _num_layers(self) -> int:
        return self.table.architecture.num_layers

    @property
    def _num_experts(self) -> int | None:
        moe = self.table.architecture.moe
        return moe.num_experts if moe else None

    def _position(self, parameter: Parameter) -> tuple[int, int, int | None]:
        """(stage, chunk, local layer number or None)."""
        if parameter.region is Region.FIRST:
            return 0, 0, None
        if parameter.region is Region.LAST:
            return self.layout.pp - 1, self.layout.vpp - 1, None
        assert parameter.layer is not None, f"{parameter.name} is in no layer"
        return self._layers[parameter.layer]

    def _local_experts(self, ep_rank: int) -> range:
        assert self._num_experts is not None, "the model has no experts"
        return self.layout.experts_of(self._num_experts, ep_rank)

    def _expert_rank(self, parameter: Parameter) -> int:
        assert parameter.expert is not None, f"{parameter.name} belongs to no expert"
        return parameter.expert // len(self._local_experts(0))

    def _is_held(self, parameter: Parameter, coords: RankCoords) -> bool:
        here = self.stage_of(parameter) == coords.pp
        return here and (not parameter.is_expert or self._expert_rank(parameter) == coords.ep)

    def _has_tied_copy(self, coords: RankCoords) -> bool:
        # Within one stage, output layer and MTP layers use the embedding itself, and no parameter is there twice.
        needed = self.table.architecture.tie_word_embeddings or self.table.with_mtp
        return needed and self.layout.pp > 1 and coords.pp == self.layout.pp - 1

    def _hold(self, parameter: Parameter, coords: RankCoords) -> HeldParameter:
        _, chunk, layer = self._position(parameter)
        if parameter.expert is None:
            name = parameter.template.format(layer=layer, expert=None)
            return HeldParameter(parameter, chunk, name, coords.tp, self.layout.tp)
        first = self._local_experts(coords.ep).start
        name = parameter.template.format(layer=layer, expert=parameter.expert - first)
        return HeldParameter(parameter, chunk, name, coords.etp, self.layout.etp)

    def _check(self) -> None:
        model, layout, wrong = self.table.architecture, self.layout, []
        try:
            layout.check_model(
                num_layers=model.num_layers,
                num_heads=model.attention.num_heads,
                num_query_groups=model.attention.num_query_groups,
                hidden_size=model.hidden_size,
                num_experts=self._num_experts,
            )
        except LayoutError as error:
            wrong.append(str(error))
        # Layers and experts share their mappings, so that only a few differ.
        for mapping, is_expert in {(parameter.mapping, parameter.is_expert): None for parameter in self.table.parameters}:
            try:
                mapping.check_size(layout.etp if is_expert else layout.tp)
            except LayoutError as error:
                wrong.append(str(error))
        if wrong:
            raise LayoutError("\n  ".join(dict.fromkeys(wrong)))
