"""What an inference engine returns for one request: tokens, and all that the trainer needs to replay how they were sampled."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.records import RaggedIds


@dataclass(frozen=True)
class Completion:
    """C tokens that the policy sampled after a prompt of P tokens; L MoE layers, K experts a token."""

    token_ids: np.ndarray  # i32 [C]
    logprobs: np.ndarray  # f32 [C]; of the tempered, truncated distribution that the token was sampled from
    keep_sets: RaggedIds  # of C rows
    routed_experts: np.ndarray  # u8 | u16 [P + C - 1, L, K]
    policy_versions: np.ndarray  # i32 [C]
    finish_reason: str  # 'stop' | 'length'
