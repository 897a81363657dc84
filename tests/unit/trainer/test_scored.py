"""What is kept of a step's log-probs: the right tokens of the right rollouts."""

from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.batching import Alignment, AssemblyOptions
from megatron_rl.batching.collate import Member, collate
from megatron_rl.objective import ratio_counts
from megatron_rl.records import ModelContract, PlanEntry, RaggedIds, Rollout, Sampling, StepPlan
from megatron_rl.trainer.scored import LogProbRecorder, completion_scores, shown_entries


def entry(uid: str, advantage: float) -> PlanEntry:
    return PlanEntry(uid, 0, "rollouts/g.safetensors", 0, 5, 2, advantage)


def rollout(uid: str, num_prompt: int, loss_mask: list[bool]) -> Rollout:
    num_tokens = len(loss_mask)
    return Rollout(
        uid=uid,
        prompt_ids=np.ones(num_prompt, dtype=np.int32),
        completion_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        keep_sets=RaggedIds.empty(num_tokens),
        routed_experts=np.zeros((num_prompt + num_tokens - 1, 0, 0), dtype=np.uint8),
        policy_versions=np.zeros(num_tokens, dtype=np.int32),
        loss_mask=np.array(loss_mask),
        sampling=Sampling(top_p=1.0),
        finish_reason="stop",
        reward=0.0,
    )


def test_best_and_worst_are_shown():
    plan = StepPlan(0, tuple(entry(f"g.{n}", a) for n, a in enumerate([0.5, -2.0, 3.0, 0.0])))
    assert shown_entries(plan, 2) == {1, 2}
    assert shown_entries(plan, 9) == {0, 1, 2, 3}
    assert shown_entries(plan, 0) == set()


def test_each_token_has_the_value_of_the_position_that_predicts_it():
    rollouts = [rollout("g.0", 3, [True, True]), rollout("g.1", 2, [True, False, True, False]), rollout("g.2", 4, [True])]
    options = AssemblyOptions(ModelContract(50, (), 0, 0), 64, moe_layers=())
    microbatches = [
        collate([Member(number, rollouts[number], 0.0) for number in numbers], 0, Alignment(1, 1), options)
        for numbers in ([2, 1], [0])
    ]
    log_probs = [-torch.rand(m.num_positions, generator=torch.Generator().manual_seed(n)) for n, m in enumerate(microbatches)]
    found = completion_scores(microbatches, log_probs, [entry(r.uid, 0.0) for r in rollouts], {0, 1})
    assert set(found) == {"g.0", "g.1"}
    np.testing.assert_array_equal(found["g.0"], log_probs[1][2:4].numpy())
    # g.1 is after the 5 tokens of g.2: its completion is predicted from position 5 + 2 - 1 on, its second token is a tool's.
    np.testing.assert_array_equal(found["g.1"], [log_probs[0][6], np.nan, log_probs[0][8]])


def test_a_kept_loss_is_the_loss():
    seen = []
    loss = LogProbRecorder(lambda log_probs, batch: seen.append(batch) or (2 * log_probs.sum(), "measured"))
    values = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    batch = SimpleNamespace(position=torch.tensor([1, 3]), rollout_logprobs=torch.tensor([-2.0, -4.5]))
    share, measured = loss(values, batch)
    share.backward()
    assert (seen, measured) == ([batch], "measured") and torch.equal(values.grad, torch.full((4,), 2.0))
    assert torch.equal(loss.log_probs[0], values.detach()) and not loss.log_probs[0].requires_grad
    assert torch.equal(loss.ratio_counts[0], ratio_counts(torch.tensor([0.0, 0.5])))
