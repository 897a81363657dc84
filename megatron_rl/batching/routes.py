"""The recorded routes of a microbatch: moved for a diagnosis, and cut to the tokens of one rank."""

from dataclasses import replace

import numpy as np

from megatron_rl.batching.microbatch import Microbatch
from megatron_rl.batching.positions import routed_positions
from megatron_rl.topology import Layout, RankCoords


def cut_routes(microbatch: Microbatch, layout: Layout, coords: RankCoords, *, sequence_parallel: bool) -> Microbatch:
    """Of a whole microbatch: the rows of the tokens that this rank's routers see, in memory of their own."""
    if microbatch.routed_experts is None:
        return microbatch
    own = routed_positions(microbatch.segment_ends, layout, coords, sequence_parallel=sequence_parallel)
    if len(own) == microbatch.num_positions:
        return microbatch
    return replace(
        microbatch, routed_experts=microbatch.routed_experts[own], route_mask=microbatch.route_mask[own], route_positions=own
    )


def shift_routes(microbatch: Microbatch, shift: int) -> Microbatch:
    """Of a whole microbatch: position i takes the row of position i + shift of its own sequence, and none where that has none."""
    if microbatch.routed_experts is None or not shift:
        return microbatch
    source = np.arange(microbatch.num_positions) + shift
    inside = (source >= 0) & (source < microbatch.num_positions)
    source = np.where(inside, source, 0)
    recorded = inside & microbatch.route_mask[source] & (microbatch.sequence[source] == microbatch.sequence)
    return replace(microbatch, routed_experts=microbatch.routed_experts[source], route_mask=recorded)
