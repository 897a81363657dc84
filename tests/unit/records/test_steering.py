"""The plan's own numbers, which are the denominators of the loss."""

from megatron_rl.records import PlanEntry, StepPlan


def entry(uid, num_loss_tokens):
    return PlanEntry(
        uid, prompt_index=0, file="rollouts/g.safetensors", index=0, num_tokens=9, num_loss_tokens=num_loss_tokens, advantage=0.5
    )


def test_denominators_count_loss_tokens_and_the_sequences_that_have_some():
    plan = StepPlan(step=2, entries=(entry("a", 4), entry("b", 0), entry("c", 3)))
    assert (plan.num_loss_tokens, plan.num_sequences) == (7, 2)
    assert (StepPlan(0, ()).num_loss_tokens, StepPlan(0, ()).num_sequences) == (0, 0)
