"""Random rollouts that keep their contract, for tests of whatever reads them."""

from dataclasses import replace

import numpy as np

from megatron_rl.records import ModelContract, RaggedIds, Rollout, Sampling

CONTRACT = ModelContract(vocab_size=50, moe_layers=(0, 1, 2), num_experts=7, experts_per_token=2)
TRUNCATED = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=16)


def make_rollout(
    rng: np.random.Generator,
    uid: str = "g000000.0",
    *,
    num_prompt: int = 4,
    num_completion: int = 6,
    contract: ModelContract = CONTRACT,
    sampling: Sampling = TRUNCATED,
    version: int = 3,
    tool_tokens: tuple[int, ...] = (),
) -> Rollout:
    """Sets of 1 to 5 ids in random order; from the middle on tokens are one version newer; tool tokens carry no loss and no
    set."""
    completion = rng.integers(0, contract.vocab_size, num_completion)
    loss = np.ones(num_completion, dtype=bool)
    loss[list(tool_tokens)] = False
    sets = []
    for token, sampled in zip(completion, loss, strict=True):
        others = rng.permutation(np.delete(np.arange(contract.vocab_size), token))[: rng.integers(0, 5)]
        sets.append(rng.permutation(np.append(others, token)) if sampled and sampling.truncates else np.zeros(0, dtype=np.int64))
    routes_of = rng.random((num_prompt + num_completion - 1, contract.num_moe_layers, contract.num_experts)).argsort(-1)
    return Rollout(
        uid=uid,
        prompt_ids=rng.integers(0, contract.vocab_size, num_prompt).astype(np.int32),
        completion_ids=completion.astype(np.int32),
        logprobs=np.where(loss, -rng.random(num_completion), 0).astype(np.float32),
        keep_sets=RaggedIds.of(sets),
        routed_experts=routes_of[..., : contract.experts_per_token].astype(
            np.uint8 if contract.num_experts <= 256 else np.uint16
        ),
        policy_versions=(version + (np.arange(num_completion) >= num_completion // 2)).astype(np.int32),
        loss_mask=loss,
        sampling=sampling,
        finish_reason="stop",
        reward=float(rng.integers(0, 2)),
    )


def with_array(rollout: Rollout, name: str, place: object, value: object) -> Rollout:
    """The rollout with one entry of one array changed."""
    array = getattr(rollout, name).copy()
    array[place] = value
    return replace(rollout, **{name: array})


def with_kept_id(rollout: Rollout, place: int, value: int) -> Rollout:
    """The rollout with one of the ids of its keep-sets changed."""
    ids = rollout.keep_sets.ids.copy()
    ids[place] = value
    return replace(rollout, keep_sets=RaggedIds(ids, rollout.keep_sets.offsets))
