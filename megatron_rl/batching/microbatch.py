"""What one pipeline microbatch holds, as numpy arrays; made by packing, consumed by the engine."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.records import RaggedIds


@dataclass(frozen=True)
class Microbatch:
    """S sequences packed one after the other into N positions; position i predicts token i + 1 of its own sequence.

    `num_padding` positions are padding (token 0, no loss), so that N is a multiple of what the layout asks for: a last segment of
    its own and, with context parallelism, the tail of each sequence's segment. All microbatches of a data-parallel rank are known
    to each of its ranks; one without sequences is all padding (S = 1).
    Arrays over positions describe the PREDICTED token: a position whose target is no loss token (prompt, tool output, a
    sequence's last position, padding) has loss_mask false, an empty keep-set, and zeros.
    """

    tokens: np.ndarray  # i64 [N]
    positions: np.ndarray  # i64 [N], from 0 in each sequence
    segment_ends: np.ndarray  # i32 [S + 1], from 0 to N: Megatron's cu_seqlens, padding included as its own segment
    targets: np.ndarray  # i64 [N]; 0 where there is no loss
    loss_mask: np.ndarray  # bool [N]
    keep_sets: RaggedIds  # of N rows
    full_rows: np.ndarray  # bool [N]: loss tokens without a set, normalised over the whole vocabulary
    singleton: np.ndarray  # bool [N]: loss tokens whose recorded set has one element, also when the sets are not replayed
    temperature: np.ndarray  # f32 [N]; 1 where there is no loss
    rollout_logprobs: np.ndarray  # f32 [N]
    advantages: np.ndarray  # f32 [N]
    staleness: np.ndarray  # i32 [N], versions between the sampling of the target and the plan
    sequence: np.ndarray  # i32 [N], which of the plan's entries; -1 for padding
    completion_index: np.ndarray  # i32 [N], place of the target among its rollout's completion tokens; -1 where there is no loss
    routed_experts: np.ndarray | None  # u8 | u16 [T, L', K] of the L' MoE layers asked for; None: no replay
    route_mask: (
        np.ndarray | None
    )  # bool [T]: rows with recorded routes; others (a sequence's last position, padding) route freely
    route_positions: np.ndarray | None  # i64 [T], rising: the positions of these rows; all N until they are cut to one rank's
    num_padding: int

    @property
    def num_positions(self) -> int:
        return len(self.tokens)
