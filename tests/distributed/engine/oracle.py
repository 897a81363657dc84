"""The same step by the check's oracle, transformers' model in float64, with the recorded routes and keep-sets."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batching import Microbatch, alignment_of
from megatron_rl.batching.collate import collate
from megatron_rl.conversion import write_hf_checkpoint
from megatron_rl.keep_set import KeepSets, reference_log_probs
from megatron_rl.objective import token_batch
from megatron_rl.preflight.oracle import Oracle
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Role
from tests.distributed.engine.cases import by_sequence
from tests.distributed.engine.subject import (
    CONFIGS,
    all_layers,
    config_of,
    denominators_of,
    loss_of,
    options_of,
    rollouts_of,
    weights_of,
)


@dataclass(frozen=True)
class Expected:
    log_probs: dict[int, np.ndarray]
    entropies: dict[int, np.ndarray]
    gradients: dict[str, Tensor]
    loss: float


def expected(model: str, *, routing_replay: bool = True) -> Expected:
    members = rollouts_of(model)
    options = options_of(model, moe_layers=all_layers(model), routing_replay=routing_replay)
    packed = collate(members, 0, alignment_of(Layout(), False), options)
    oracle = hugging_face(model)
    logits = torch.cat([_logits(oracle, packed, start, end) for start, end in pairwise(packed.segment_ends)])
    vocab_size = CONFIGS[model]["vocab_size"]
    log_probs, entropies = reference_log_probs(  # of hidden states that are the logits already
        logits,
        torch.eye(vocab_size, dtype=torch.float64),
        _keep_sets(packed),
        temperature=torch.from_numpy(packed.temperature),
        vocab_size=vocab_size,
    )
    loss, _ = loss_of(config_of(model, Layout()))(
        log_probs, token_batch(packed, denominators_of(members), entropy=entropies.float())
    )
    return Expected(
        by_sequence([packed], [log_probs.detach().numpy()]), by_sequence([packed], [entropies.detach().numpy()]),
        oracle.gradients(loss) | _no_gradients(model), float(loss.detach()),
    )  # fmt: skip


def _no_gradients(model: str) -> dict[str, Tensor]:
    """Of selection biases, which are buffers in transformers."""
    parameters = [p for p in ParameterTable(CONFIGS[model]).parameters if p.role is Role.SELECTION_BIAS]
    return {tensor.name: torch.zeros(tensor.shape) for parameter in parameters for tensor in parameter.hf}


def hugging_face(model: str) -> Oracle:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        own = ParameterTable(CONFIGS[model]).hf_shapes  # transformers knows no layers for multi-token prediction
        weights = ((name, weight) for name, weight in weights_of(model).items() if name in own)
        write_hf_checkpoint(folder, weights, CONFIGS[model], dtype=torch.float32)
        return Oracle(folder)


def _logits(oracle: Oracle, packed: Microbatch, start: int, end: int) -> Tensor:
    """f64 [end - start, V] of one sequence; its last position has no recorded experts."""
    experts = None if packed.routed_experts is None else packed.routed_experts[start : end - 1]
    return oracle.logits(packed.tokens[start:end], experts)[0]


def _keep_sets(packed: Microbatch) -> KeepSets:
    return KeepSets.from_ragged(packed.targets, packed.loss_mask, packed.full_rows, packed.keep_sets)
