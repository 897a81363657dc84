"""All that crosses a process boundary: frozen dataclasses, their files and their checks."""

from megatron_rl.config.sampling import Sampling
from megatron_rl.records.errors import ContractError
from megatron_rl.records.payload import Payload, PayloadError, write_atomically, write_payload
from megatron_rl.records.ragged import RaggedIds
from megatron_rl.records.rollout import ModelContract, Rollout, check_keep_mass, check_keep_sets, check_rollout
from megatron_rl.records.scores import read_scores, write_scores
from megatron_rl.records.steering import GroupResult, GroupTask, PlanEntry, RolloutSummary, StepPlan

__all__ = [
    "ContractError", "GroupResult", "GroupTask", "ModelContract", "Payload", "PayloadError", "PlanEntry", "RaggedIds", "Rollout", "RolloutSummary",
    "Sampling", "StepPlan", "check_keep_mass", "check_keep_sets", "check_rollout", "read_scores", "write_atomically", "write_payload",
    "write_scores",
]  # fmt: skip
