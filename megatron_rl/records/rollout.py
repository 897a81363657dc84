"""One sampled sequence with all that the trainer needs to score it as the sampler did."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.config.sampling import Sampling
from megatron_rl.records.errors import ContractError
from megatron_rl.records.model_contract import ModelContract
from megatron_rl.records.ragged import RaggedIds


@dataclass(frozen=True)
class Rollout:
    """One prompt of P tokens and C further tokens of a model with L MoE layers and K experts a token.

    Tokens that the policy did not sample (tool output in a multi-turn episode) are among the C with `loss_mask` false, log-prob
    0, an empty keep-set, and the version that was current when they were read.

    Example: the prompt "2*3=" answered "6" and an end-of-sequence token, sampled at top_p 0.9 from a model of 4 MoE layers with 2
    of 8 experts a token; "6" had one rival, the end none:

        prompt_ids [5, 42, 6, 61], completion_ids [9, 0], logprobs [-0.22, 0.0], keep_sets [[9, 8], [0]],
        routed_experts of shape [5, 4, 2], policy_versions [12, 12], loss_mask [True, True], finish_reason 'stop', reward 1.0
    """

    uid: str
    """'g000012.3' is the 4th sample of group 12."""
    prompt_ids: np.ndarray
    """i32 [P], token ids."""
    completion_ids: np.ndarray
    """i32 [C], token ids."""
    logprobs: np.ndarray
    """f32 [C], nats, of the truncated and tempered distribution, as the engine reports them."""
    keep_sets: RaggedIds
    """C rows: the ids that survived truncation for each completion token. Empty for tool output, and where nothing was
    truncated."""
    routed_experts: np.ndarray
    """u8 | u16 [P + C - 1, L, K]. Row i routes token i; the last token is never routed."""
    policy_versions: np.ndarray
    """i32 [C], the version of the weights that sampled each token; never falls within a sequence."""
    loss_mask: np.ndarray
    """bool [C], true for the tokens that the policy sampled."""
    sampling: Sampling
    finish_reason: str
    """'stop' | 'length'."""
    reward: float

    @property
    def num_tokens(self) -> int:
        """P + C."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def set_sizes(self) -> np.ndarray:
        """i64 [C]; 0 where there is no set."""
        return self.keep_sets.sizes

    @property
    def singletons(self) -> np.ndarray:
        """bool [C]: loss tokens whose keep-set has one element."""
        return (self.set_sizes == 1) & self.loss_mask


def check_rollout(rollout: Rollout, contract: ModelContract) -> None:
    """Check a record against its contract; vectorised, no per-token Python.

    Raises:
        ContractError: At the first broken rule, with rollout, token and value.
    """
    _check_tokens(rollout, contract)
    check_keep_sets(rollout, contract.vocab_size)
    if contract.num_moe_layers:
        _check_routes(rollout, contract)


def _refuse(rollout: Rollout, token: int | None, value: object, rule: str) -> None:
    raise ContractError(rollout=rollout.uid, token=token, value=value, rule=rule)


def _first(mask: np.ndarray) -> int:
    return int(np.flatnonzero(mask)[0])


def _check_tokens(r: Rollout, contract: ModelContract) -> None:
    num_completion = len(r.completion_ids)
    if not len(r.prompt_ids) or not num_completion:
        _refuse(r, None, f"{len(r.prompt_ids)} prompt and {num_completion} completion tokens", "both are at least one token long")
    for name in ("logprobs", "policy_versions", "loss_mask"):
        if getattr(r, name).shape != (num_completion,):
            _refuse(
                r,
                None,
                f"{name} of shape {getattr(r, name).shape}",
                f"{name} has one entry for each of the {num_completion} completion tokens",
            )
    for name in ("prompt_ids", "completion_ids"):
        ids = getattr(r, name)
        bad = (ids < 0) | (ids >= contract.vocab_size)
        if bad.any():
            _refuse(r, _first(bad), f"{name} {ids[_first(bad)]}", f"token ids are in 0..{contract.vocab_size - 1}")
    bad = ~np.isfinite(r.logprobs) | (r.logprobs > 1e-4)  # the engine rounds: a log-prob of a sure token may be a few ulp above 0
    if bad.any():
        _refuse(r, _first(bad), f"log-prob {r.logprobs[_first(bad)]}", "log-probs are finite and at most 0")
    if (r.policy_versions < 0).any() or (np.diff(r.policy_versions) < 0).any():
        _refuse(
            r, None, f"policy versions {r.policy_versions.tolist()}", "versions are at least 0 and never fall within a sequence"
        )
    if not np.isfinite(r.reward):
        _refuse(r, None, f"reward {r.reward}", "the reward is a finite number")


def check_keep_sets(r: Rollout, vocab_size: int) -> None:
    """Check the contract of the keep-sets alone: shape, range, no repetition, the sampled token inside, no torn pairs.

    Raises:
        ContractError: At the first broken rule.
    """
    ids, offsets, sizes = r.keep_sets.ids, r.keep_sets.offsets, r.set_sizes
    num_completion = len(r.completion_ids)
    offsets_fit = offsets.shape == (num_completion + 1,) and offsets[0] == 0 and offsets[-1] == len(ids)
    if not offsets_fit or (sizes < 0).any():
        _refuse(
            r,
            None,
            f"keep_offsets of shape {offsets.shape} for {len(ids)} ids",
            "offsets rise from 0 to the number of ids, one step a completion token",
        )
    wanted = r.loss_mask & r.sampling.truncates
    torn = (sizes > 0) != wanted
    if torn.any():
        t = _first(torn)
        found = (
            f"a log-prob without a keep-set (log-prob {r.logprobs[t]})"
            if wanted[t]
            else f"a keep-set of {sizes[t]} ids where none belongs"
        )
        _refuse(r, t, found, "a token has a keep-set exactly when the policy sampled it from a truncated distribution")
    owner = np.repeat(np.arange(num_completion), sizes)
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        i = _first(bad)
        _refuse(
            r,
            int(owner[i]),
            f"keep-set id {ids[i]}",
            f"keep-set ids are in 0..{vocab_size - 1}, the vocabulary without its padding",
        )
    key = np.sort(owner.astype(np.int64) * vocab_size + ids)
    repeated = key[1:] == key[:-1]
    if repeated.any():
        i = _first(repeated)
        _refuse(r, int(key[i] // vocab_size), f"keep-set id {key[i] % vocab_size} twice", "an id is in a keep-set once")
    holds = np.zeros(num_completion, dtype=bool)
    holds[owner[ids == r.completion_ids[owner]]] = True
    bad = wanted & ~holds
    if bad.any():
        t = _first(bad)
        kept = r.keep_sets[t]
        _refuse(
            r, t, f"token {r.completion_ids[t]} sampled from the set {kept[:8].tolist()}", "the sampled token is in its keep-set"
        )


def _check_routes(r: Rollout, contract: ModelContract) -> None:
    routes = r.routed_experts
    shape = (r.num_tokens - 1, contract.num_moe_layers, contract.experts_per_token)
    if routes.shape != shape:
        _refuse(
            r, None, f"routes of shape {routes.shape}", f"routes have shape [tokens - 1, MoE layers, experts per token] = {shape}"
        )
    if routes.dtype not in (np.uint8, np.uint16):
        _refuse(r, None, f"routes of dtype {routes.dtype}", "routes are uint8 or uint16")
    if routes.dtype == np.uint8 and contract.num_experts > 256:
        _refuse(r, None, f"uint8 routes for {contract.num_experts} experts", "more than 256 experts need uint16")
    bad = routes >= contract.num_experts
    if bad.any():
        t, layer, k = np.argwhere(bad)[0]
        _refuse(r, int(t), f"expert {routes[t, layer, k]} in MoE layer {layer}", f"experts are in 0..{contract.num_experts - 1}")
    ordered = np.sort(routes, axis=-1)
    repeated = ordered[..., 1:] == ordered[..., :-1]
    if repeated.any():
        t, layer, k = np.argwhere(repeated)[0]
        _refuse(
            r, int(t), f"expert {ordered[t, layer, k]} twice in MoE layer {layer}", "a token goes to each of its experts once"
        )


def check_keep_mass(uid: str, keep_sets: RaggedIds, keep_logprobs: np.ndarray, tolerance: float) -> None:
    """Check that the keep-set has all of the probability mass, where the engine gave log-probs for them.

    A smaller mass means that the set was cut, for example by ties beyond the number of log-probs that was asked for.

    Args:
        uid: Id of the rollout, for the message.
        keep_sets: C rows; those without ids are passed over.
        keep_logprobs: f32 [nnz], of the ids of keep_sets.
        tolerance: Largest |mass - 1|.

    Raises:
        ContractError: At the first token whose mass is off.
    """
    sizes = keep_sets.sizes
    mass = np.zeros(len(sizes), dtype=np.float64)
    np.add.at(mass, np.repeat(np.arange(len(sizes)), sizes), np.exp(keep_logprobs.astype(np.float64)))
    bad = (sizes > 0) & ~(np.abs(mass - 1.0) <= tolerance)  # a NaN is bad too
    if bad.any():
        t = _first(bad)
        rule = (
            f"the keep-set has all of the probability mass (within {tolerance}); with less it is incomplete: "
            "raise rollouts.max_keep_set"
        )
        raise ContractError(rollout=uid, token=t, value=f"a probability mass of {mass[t]:.6f} over {sizes[t]} ids", rule=rule)
