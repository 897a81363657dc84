"""All that crosses a process boundary: frozen dataclasses, their files and their checks."""

from megatron_rl.config.sampling import Sampling
from megatron_rl.records.atomic_file import write_atomically
from megatron_rl.records.errors import ContractError
from megatron_rl.records.model_contract import ModelContract, ModelContractError, read_model_contract, write_model_contract
from megatron_rl.records.payload import Payload, PayloadError, write_payload
from megatron_rl.records.ragged import RaggedIds
from megatron_rl.records.rollout import Rollout, check_keep_mass, check_keep_sets, check_rollout
from megatron_rl.records.scores import read_scores, write_scores
from megatron_rl.records.steering import GroupResult, GroupTask, PlanEntry, RolloutSummary, StepPlan

__all__ = [
    "ContractError",
    "GroupResult",
    "GroupTask",
    "ModelContract",
    "ModelContractError",
    "Payload",
    "PayloadError",
    "PlanEntry",
    "RaggedIds",
    "Rollout",
    "RolloutSummary",
    "Sampling",
    "StepPlan",
    "check_keep_mass",
    "check_keep_sets",
    "check_rollout",
    "read_model_contract",
    "read_scores",
    "write_atomically",
    "write_model_contract",
    "write_payload",
    "write_scores",
]
