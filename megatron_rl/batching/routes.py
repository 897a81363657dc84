"""The recorded routes of a microbatch: cut to the tokens of one rank, and shifted for a diagnosis."""

from dataclasses import replace

import numpy as np

from megatron_rl.batching.microbatch import Microbatch
from megatron_rl.batching.positions import routed_positions
from megatron_rl.topology import Layout, RankCoords


def cut_routes(microbatch: Microbatch, layout: Layout, coords: RankCoords, *, sequence_parallel: bool) -> Microbatch:
    """Keep the rows of the tokens that this rank's routers see, in memory of their own, so that the others' is freed.

    Args:
        microbatch: With the routes of all positions.
        layout: Layout of the run.
        coords: Coordinates of this rank.
        sequence_parallel: Whether the tensor-parallel ranks share the positions.
    """
    if microbatch.routed_experts is None or microbatch.route_mask is None:
        return microbatch
    own = routed_positions(microbatch.segment_ends, layout, coords, sequence_parallel=sequence_parallel)
    if len(own) == microbatch.num_positions:
        return microbatch
    return replace(
        microbatch, routed_experts=microbatch.routed_experts[own], route_mask=microbatch.route_mask[own], route_positions=own
    )


def shift_routes(microbatch: Microbatch, shift: int) -> Microbatch:
    """Give each position i the row of position i + shift of the same sequence, and none where that has none; for a diagnosis."""
    if microbatch.routed_experts is None or microbatch.route_mask is None or not shift:
        return microbatch
    source = np.arange(microbatch.num_positions) + shift
    inside = (source >= 0) & (source < microbatch.num_positions)
    source = np.where(inside, source, 0)
    recorded = inside & microbatch.route_mask[source] & (microbatch.sequence[source] == microbatch.sequence)
    return replace(microbatch, routed_experts=microbatch.routed_experts[source], route_mask=recorded)
