"""A Microbatch as the tensors of one rank's forward pass, head and loss."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl.batching import Microbatch, SequenceSlice
from megatron_rl.engine.replay import Routes
from megatron_rl.keep_set import KeepSets


@dataclass(frozen=True)
class DeviceMicrobatch:
    """One microbatch on one rank, which holds n of its N positions: all, without context parallelism."""

    source: Microbatch
    slices: SequenceSlice
    tokens: Tensor  # i64 [1, n]
    positions: Tensor  # i64 [1, n]
    packing: PackedSeqParams
    """Packing of the complete microbatch."""
    routes: Routes | None
    temperature: Tensor  # f32 [n]
    keep_sets: KeepSets
    """Keep-sets of the n positions. On the CPU, so that the head makes its shard plan from it without waiting for the device."""
    old_logprobs: Tensor | None = None  # f32 [N]
    reference_logprobs: Tensor | None = None  # f32 [N]


def to_device(
    microbatch: Microbatch,
    slices: SequenceSlice,
    device: torch.device,
    routes: Routes | None = None,
    *,
    old_logprobs: np.ndarray | None = None,
    reference_logprobs: np.ndarray | None = None,
) -> DeviceMicrobatch:
    """Copy this rank's positions of a microbatch to its device.

    Args:
        microbatch: N positions.
        slices: Which of them this rank holds.
        device: Device of the model.
        routes: Routes of this rank's tokens; None: no replay.
        old_logprobs: f32 [N], as `Engine.score` gave them for this microbatch.
        reference_logprobs: f32 [N], as `Engine.score_reference` gave them for this microbatch.
    """
    return DeviceMicrobatch(
        source=microbatch,
        slices=slices,
        tokens=_tensor(microbatch.tokens[slices.own], torch.int64, device)[None],
        positions=_tensor(microbatch.positions[slices.own], torch.int64, device)[None],
        packing=_packing(microbatch, device, is_cut=len(slices.own) < microbatch.num_positions),
        routes=routes,
        temperature=_tensor(microbatch.temperature[slices.own], torch.float32, device),
        keep_sets=_keep_sets(microbatch, slices.own),
        old_logprobs=_scores("old_logprobs", old_logprobs, microbatch, device),
        reference_logprobs=_scores("reference_logprobs", reference_logprobs, microbatch, device),
    )


def _packing(microbatch: Microbatch, device: torch.device, *, is_cut: bool) -> PackedSeqParams:
    ends = _tensor(microbatch.segment_ends, torch.int32, device)
    longest = int(np.diff(microbatch.segment_ends).max())
    # With context parallelism Transformer Engine needs these, too. A sequence's padding is a part of it here: it comes after
    # the tokens, which do not attend to it.
    padded = {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends} if is_cut else {}
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest, **padded
    )


def _keep_sets(microbatch: Microbatch, own: np.ndarray) -> KeepSets:
    sets = microbatch.keep_sets.select(own) if len(own) < microbatch.num_positions else microbatch.keep_sets
    return KeepSets.from_ragged(microbatch.targets[own], microbatch.loss_mask[own], microbatch.full_rows[own], sets)


def _scores(name: str, values: np.ndarray | None, microbatch: Microbatch, device: torch.device) -> Tensor | None:
    if values is None:
        return None
    if values.shape != microbatch.tokens.shape:
        raise ValueError(
            f"{name} has shape {values.shape}; it must have one value for each of the {microbatch.num_positions} positions"
        )
    return _tensor(values, torch.float32, device)


def _tensor(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)
