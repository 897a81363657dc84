"""One answer of vLLM's /inference/v1/generate, decoded into the arrays of the records. Pure.

vLLM 0.30 names the token of a log-prob by the text "token_id:17", 0.32 and later by the integer `token_id`; both are read. A
log-prob of minus infinity is -9999.
"""

import base64
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.engine import KeepSetSource
from megatron_rl.inference.vllm.npy import read_npy
from megatron_rl.records import ContractError, RaggedIds, Sampling, check_keep_mass

_EXCLUDED = -9999.0
_MASS_TOLERANCE = 1e-4  # fp32 sums of 64 probabilities come within 1e-6 of 1; a set that was cut lacks more than that
_ID_PREFIX = len("token_id:")


def num_logprobs(sampling: Sampling, source: KeepSetSource, max_keep_set: int, vocab_size: int) -> int:
    """How many log-probs of each token to ask for; with 0 the engine gives that of the sampled token alone."""
    wants_set = sampling.truncates and source == "processed_logprobs"
    return min(max_keep_set, vocab_size) if wants_set else 0


def decode_completion(
    uid: str,
    choice: dict[str, Any],
    spans: Sequence[Sequence[int]],
    sampling: Sampling,
    source: KeepSetSource,
    moe_layers: Sequence[int],
) -> Completion:
    """One choice of a generate response as a record's arrays.

    Args:
        uid: Names the request in errors.
        choice: The choice of the JSON response.
        spans: [[first generated token, policy version], ...].
        sampling: What was asked for; a distribution that is not truncated has no keep-sets.
        source: How keep-sets are read.
        moe_layers: Numbers of the layers with experts, whose routes are kept.

    Raises:
        ContractError: These do not make a complete record.
    """
    token_ids = np.array(choice["token_ids"], dtype=np.int32)
    content = choice["logprobs"]["content"]
    if len(content) != len(token_ids) or (_ids(content) != token_ids).any():
        rule = "there is a log-prob for each sampled token, in order"
        raise ContractError(rollout=uid, token=None, value=f"log-probs of {len(content)} tokens for {len(token_ids)}", rule=rule)
    return Completion(
        token_ids=token_ids,
        logprobs=np.array([entry["logprob"] for entry in content], dtype=np.float32),
        keep_sets=_keep_sets(uid, choice, sampling, source),
        routed_experts=_routes(uid, choice.get("routed_experts"), moe_layers),
        policy_versions=_versions(uid, spans, len(token_ids)),
        finish_reason=choice["finish_reason"],
    )


def _ids(entries: Sequence[dict[str, Any]]) -> np.ndarray:
    """i32, one for each entry; all entries of an answer have the same form, and there may be a million of them."""
    if entries and "token_id" in entries[0]:
        return np.array([entry["token_id"] for entry in entries], dtype=np.int32)
    return np.array([int(entry["token"][_ID_PREFIX:]) for entry in entries], dtype=np.int32)


def _keep_sets(uid: str, choice: dict[str, Any], sampling: Sampling, source: KeepSetSource) -> RaggedIds:
    """Keep-sets of C tokens; empty where the distribution is not truncated."""
    if not sampling.truncates:
        return RaggedIds.empty(len(choice["token_ids"]))
    if source == "native":
        masks = choice.get("sampling_mask")
        if masks is None:
            rule = "the engine was started to return its sampling mask (--return-sampling-mask)"
            raise ContractError(rollout=uid, token=None, value="no sampling mask", rule=rule)
        return _ragged(list(chain.from_iterable(masks)), masks)
    kept = [[e for e in token["top_logprobs"] if e["logprob"] > _EXCLUDED] for token in choice["logprobs"]["content"]]
    entries = list(chain.from_iterable(kept))
    keep_sets = _ragged(_ids(entries), kept)
    check_keep_mass(uid, keep_sets, np.array([e["logprob"] for e in entries], dtype=np.float32), _MASS_TOLERANCE)
    return keep_sets


def _ragged(ids: Sequence[int] | np.ndarray, rows: Sequence[Sequence[Any]]) -> RaggedIds:
    """ids: of all rows, one after the other."""
    return RaggedIds.from_sizes(np.array(ids, dtype=np.int32), np.array([len(row) for row in rows], dtype=np.int64))


def _routes(uid: str, encoded: str | None, moe_layers: Sequence[int]) -> np.ndarray:
    """[rows, L, K]: the engine's array has a column for every layer, of which those of dense layers mean nothing."""
    if not moe_layers:
        return np.zeros((0, 0, 0), dtype=np.uint8)
    if encoded is None:
        rule = "the engine was started to return the experts of each token (--enable-return-routed-experts)"
        raise ContractError(rollout=uid, token=None, value="no routes", rule=rule)
    try:
        routes = read_npy(base64.b64decode(encoded, validate=True))
    except ValueError as error:  # binascii.Error is one too
        raise ContractError(
            rollout=uid, token=None, value=f"routes that cannot be read ({error})", rule="routes are a base64 .npy"
        ) from error
    if routes.ndim != 3 or routes.shape[1] <= max(moe_layers):
        rule = f"routes have shape [tokens - 1, layers, experts per token] with more than {max(moe_layers)} layers"
        raise ContractError(rollout=uid, token=None, value=f"routes of shape {routes.shape}", rule=rule)
    if routes.dtype == np.int32:  # newer engines do not narrow; what does not fit the record's type fails its check
        routes = np.where((routes >= 0) & (routes < 0xFFFF), routes, 0xFFFF).astype(np.uint16)
    return np.ascontiguousarray(routes[:, list(moe_layers)])


def _versions(uid: str, spans: Sequence[Sequence[int]], num_tokens: int) -> np.ndarray:
    """i32 [C] from [[first token, version], ...]."""
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    versions = np.array([version for _, version in spans], dtype=np.int32)
    if not len(starts) or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= num_tokens:
        rule = f"version spans start at 0, rise, and end within the {num_tokens} tokens"
        raise ContractError(rollout=uid, token=None, value=f"version spans {[list(span) for span in spans]}", rule=rule)
    return np.repeat(versions, np.diff(np.append(starts, num_tokens)))
