"""A Microbatch as the tensors of one rank's forward pass, head and loss."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.engine.replay import Routes
from megatron_rl.keep_set import KeepSets


@dataclass(frozen=True)
class DeviceMicrobatch:
    """One microbatch on one rank."""

    source: Microbatch
    tokens: Tensor  # i64 [1, N]
    positions: Tensor  # i64 [1, N]
    packing: PackedSeqParams
    routes: Routes | None
    temperature: Tensor  # f32 [N]
    keep_sets: KeepSets
    """On the CPU: the head plans from it without waiting for the device."""
    old_logprobs: Tensor | None = None  # f32 [N]
    reference_logprobs: Tensor | None = None  # f32 [N]


def to_device(
    microbatch: Microbatch, device: torch.device, routes: Routes | None = None, *,
    old_logprobs: np.ndarray | None = None, reference_logprobs: np.ndarray | None = None,
) -> DeviceMicrobatch:  # fmt: skip
    """old_logprobs, reference_logprobs: f32 [N], as `Engine.score` gave them for this microbatch."""
    return DeviceMicrobatch(
        source=microbatch, tokens=_tensor(microbatch.tokens, torch.int64, device)[None],
        positions=_tensor(microbatch.positions, torch.int64, device)[None], packing=_packing(microbatch, device), routes=routes,
        temperature=_tensor(microbatch.temperature, torch.float32, device), keep_sets=_keep_sets(microbatch),
        old_logprobs=_scores("old_logprobs", old_logprobs, microbatch, device),
        reference_logprobs=_scores("reference_logprobs", reference_logprobs, microbatch, device),
    )  # fmt: skip


def _packing(microbatch: Microbatch, device: torch.device) -> PackedSeqParams:
    ends = _tensor(microbatch.segment_ends, torch.int32, device)
    longest = int(np.diff(microbatch.segment_ends).max())
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def _keep_sets(microbatch: Microbatch) -> KeepSets:
    host = torch.device("cpu")
    return KeepSets.from_masks(
        _tensor(microbatch.targets, torch.int64, host), _tensor(microbatch.loss_mask, torch.bool, host),
        _tensor(microbatch.full_rows, torch.bool, host), _tensor(microbatch.keep_ids, torch.int32, host),
        _tensor(microbatch.keep_offsets, torch.int64, host),
    )  # fmt: skip


def _scores(name: str, values: np.ndarray | None, microbatch: Microbatch, device: torch.device) -> Tensor | None:
    if values is None:
        return None
    if values.shape != microbatch.tokens.shape:
        raise ValueError(
            f"{name} has shape {values.shape}; it has one value for each of the {microbatch.num_positions} positions"
        )
    return _tensor(values, torch.float32, device)


def _tensor(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)
