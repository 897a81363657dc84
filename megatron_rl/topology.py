"""Rank arithmetic of a parallel layout: who owns which layer, expert and vocabulary range.

The order of ranks is Megatron-Core's default, "tp-cp-ep-dp-pp": the tensor-parallel rank varies fastest, the pipeline
stage slowest. Experts have their own decomposition of the same ranks of a stage: etp fastest, then ep, then their
data-parallel rank. Pure functions of integers; nothing here knows torch.
"""

from dataclasses import dataclass

from megatron_rl.errors import UserError


class LayoutError(UserError, ValueError):
    """A layout that does not divide: the message names the numbers, the rule and the remedy."""


@dataclass(frozen=True)
class RankCoords:
    """One rank's place in each parallel dimension.

    `dp` counts replicas of the dense parameters, `edp` those of the experts; `cp` splits the sequence.
    """

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """A parallelism layout: the sizes of its dimensions, for `world_size` ranks in all; the data-parallel size follows.

    Raises:
        LayoutError: Sizes that do not divide.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    """Layers of the first and of the last stage, where they differ from the others: these stages also hold the embedding and the
    output layer, and many models have a number of layers that no pipeline size divides. None: as many as the others."""

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "cp", "ep", "etp", "vpp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} = {getattr(self, name)}: every parallel size must be at least 1")
        model = self.tp * self.pp * self.cp
        if self.world_size % model:
            raise LayoutError(
                f"world_size = {self.world_size} is not a multiple of "
                f"tp x pp x cp = {self.tp} x {self.pp} x {self.cp} = {model}; "
                f"use {-(-self.world_size // model) * model} ranks, or smaller sizes"
            )
        if self.ranks_per_stage % (self.etp * self.ep):
            raise LayoutError(
                f"{self.ranks_per_stage} ranks of a pipeline stage (tp x cp x dp) are not a multiple of "
                f"etp x ep = {self.etp} x {self.ep}; lower the expert parallelism or use more ranks"
            )
        self._check_uneven_stages()
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp = {self.vpp}: interleaved stages need a pipeline, but pp = 1; set vpp = 1 or pp > 1")

    def _check_uneven_stages(self) -> None:
        given = [size for size in (self.first_stage_layers, self.last_stage_layers) if size is not None]
        if any(size < 1 for size in given):
            raise LayoutError(
                f"stages of {given} layers: every stage has at least one; raise first_stage_layers or last_stage_layers"
            )
        if given and (self.pp == 1 or self.vpp > 1):
            raise LayoutError(
                f"first_stage_layers and last_stage_layers need pp > 1 and vpp = 1, but pp = {self.pp} and vpp = {self.vpp}; "
                "leave them out: interleaved stages are cut evenly"
            )

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp

    @property
    def dp(self) -> int:
        """Replicas of the dense parameters that see different data."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.ranks_per_stage // (self.etp * self.ep)

    def coords_of(self, rank: int) -> RankCoords:
        """The place of a global rank.

        Raises:
            LayoutError: The layout has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside 0..{self.world_size - 1}")
        within = rank % self.ranks_per_stage
        return RankCoords(
            rank=rank,
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // self.ranks_per_stage,
            etp=within % self.etp,
            ep=within // self.etp % self.ep,
            edp=within // (self.etp * self.ep),
        )

    def layers_of_chunk(self, num_layers: int, pp_rank: int, chunk: int = 0) -> range:
        """Global numbers of the layers in one virtual chunk of a stage: chunk v of stage p follows chunk v of stage p - 1.

        Args:
            num_layers: Of the model.
            pp_rank: The stage.
            chunk: Virtual pipeline chunk of the stage.
        """
        sizes = self._chunk_sizes(num_layers)
        number = chunk * self.pp + pp_rank
        start = sum(sizes[:number])
        return range(start, start + sizes[number])

    def _chunk_sizes(self, num_layers: int) -> list[int]:
        """Layers of each chunk, in the order of the forward pass."""
        ends = (self.first_stage_layers, self.last_stage_layers)
        left, count = num_layers - sum(filter(None, ends)), self.pp * self.vpp - sum(size is not None for size in ends)
        sizes = [left // count if count else 0] * (self.pp * self.vpp)
        if self.first_stage_layers is not None:
            sizes[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            sizes[-1] = self.last_stage_layers
        return sizes

    def layers_of_stage(self, num_layers: int, pp_rank: int) -> list[int]:
        """Global numbers of the layers in all chunks of a stage."""
        return [n for v in range(self.vpp) for n in self.layers_of_chunk(num_layers, pp_rank, v)]

    def experts_of(self, num_experts: int, ep_rank: int) -> range:
        """Global numbers of the experts on one expert-parallel rank."""
        per_rank = num_experts // self.ep
        return range(ep_rank * per_rank, (ep_rank + 1) * per_rank)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of tp."""
        return -(-vocab_size // self.tp) * self.tp

    def vocab_range(self, vocab_size: int, tp_rank: int) -> range:
        """Rows of the (padded) embedding on one tensor-parallel rank."""
        rows = self.padded_vocab_size(vocab_size) // self.tp
        return range(tp_rank * rows, (tp_rank + 1) * rows)

    def check_model(
        self, *, num_layers: int, num_heads: int, num_query_groups: int, hidden_size: int, num_experts: int | None
    ) -> None:
        """Check that the layout divides a model.

        Raises:
            LayoutError: Lists every size of the model that this layout does not divide.
        """
        wrong = []

        def divides(what: str, value: int, by: str, size: int) -> None:
            if value % size:
                wrong.append(f"{what} = {value} is not a multiple of {by} = {size}")

        if sum(sizes := self._chunk_sizes(num_layers)) != num_layers or min(sizes) < 1:
            wrong.append(self._uneven_text(num_layers))
        divides("num_attention_heads", num_heads, "tp", self.tp)
        divides("hidden_size", hidden_size, "tp", self.tp)
        if num_query_groups % self.tp and self.tp % num_query_groups:
            wrong.append(f"num_key_value_heads = {num_query_groups} and tp = {self.tp}: one must be a multiple of the other")
        if num_experts is not None:
            divides("num_experts", num_experts, "ep", self.ep)
        elif self.ep > 1 or self.etp > 1:
            wrong.append(f"ep = {self.ep}, etp = {self.etp}: the model has no experts; set both to 1")
        if wrong:
            raise LayoutError("the layout does not fit the model: " + "; ".join(wrong))

    def _uneven_text(self, num_layers: int) -> str:
        if self.first_stage_layers is None and self.last_stage_layers is None:
            remedy = "" if self.vpp > 1 else "; set first_stage_layers or last_stage_layers"
            return f"num_layers = {num_layers} is not a multiple of pp x vpp = {self.pp * self.vpp}{remedy}"
        return (
            f"num_layers = {num_layers} with first_stage_layers = {self.first_stage_layers} and "
            f"last_stage_layers = {self.last_stage_layers}: the rest cannot be cut evenly over the other of {self.pp} stages"
        )
