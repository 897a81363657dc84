"""What one pipeline microbatch holds, as numpy arrays: made by `collate`, consumed by the engine."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.records import RaggedIds


@dataclass(frozen=True)
class Microbatch:
    """S sequences packed one after the other into N positions; position i predicts token i + 1 of the same sequence.

    `num_padding` positions are padding (token 0, no loss), so that N is a multiple of what the layout asks for: a last segment of
    its own and, with context parallelism, the tail of each sequence's segment. All microbatches of a data-parallel rank are known
    to each of its ranks; one without sequences is all padding (S = 1).

    Arrays over positions describe the PREDICTED token: a position whose target is no loss token (prompt, tool output, a
    sequence's last position, padding) has loss_mask false, an empty keep-set, and zeros.

    Example: the prompt [5, 42] with the completion [9, 0], padded to 6 positions:

        tokens [5, 42, 9, 0, 0, 0], positions [0, 1, 2, 3, 0, 1], segment_ends [0, 4, 6], targets [0, 9, 0, 0, 0, 0],
        loss_mask [F, T, T, F, F, F], keep_sets [[], [9, 8], [0], [], [], []], completion_index [-1, 0, 1, -1, -1, -1]
    """

    tokens: np.ndarray
    """i64 [N], token ids."""
    positions: np.ndarray
    """i64 [N], from 0 in each sequence."""
    segment_ends: np.ndarray
    """i32 [S + 1], from 0 to N: Megatron's cu_seqlens. Padding after the last sequence is a segment too."""
    targets: np.ndarray
    """i64 [N], token ids; 0 where there is no loss."""
    loss_mask: np.ndarray
    """bool [N]."""
    keep_sets: RaggedIds
    """N rows; empty where there is no loss, and where the sets are not replayed."""
    full_rows: np.ndarray
    """bool [N]: loss tokens without a set, normalised over the full vocabulary."""
    singleton: np.ndarray
    """bool [N]: loss tokens whose recorded set has one element, also where the sets are not replayed."""
    temperature: np.ndarray
    """f32 [N]; 1 where there is no loss."""
    rollout_logprobs: np.ndarray
    """f32 [N], nats."""
    advantages: np.ndarray
    """f32 [N]."""
    staleness: np.ndarray
    """i32 [N], versions between the sampling of the target and the step."""
    sequence: np.ndarray
    """i32 [N], number of the step plan's entry; -1 for padding."""
    completion_index: np.ndarray
    """i32 [N], place of the target among its rollout's completion tokens; -1 where there is no loss."""
    num_padding: int
    routed_experts: np.ndarray | None = None
    """u8 | u16 [T, L', K] of the L' MoE layers of this rank; None: no replay. T is N until the rows are cut to one rank's
    tokens."""
    route_mask: np.ndarray | None = None
    """bool [T]: rows with recorded routes; the others (a sequence's last position, padding) are routed freely."""
    route_positions: np.ndarray | None = None
    """i64 [T], rising: the positions of these rows."""

    @property
    def num_positions(self) -> int:
        """N."""
        return len(self.tokens)
