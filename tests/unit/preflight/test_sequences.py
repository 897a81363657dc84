"""The sampled sequences are complete records, and forced experts are used. That the oracle is right is left to transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.preflight.oracle import Oracle, check_known_to_transformers
from megatron_rl.preflight.sequences import NUM_SEQUENCES, keep_set, sample_sequences, supervised_loss
from megatron_rl.preflight.shrink import CHECK_SIZES, SAMPLING
from megatron_rl.preflight.weights import write_random_weights
from megatron_rl.records import ModelContract, Sampling, check_rollout
from megatron_rl.weight_mapping import UnknownFamilyError
from megatron_rl.weight_mapping.shrink import shrink_model

ROOT = Path(__file__).parents[3]
MODEL = shrink_model(
    json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())["Qwen3-30B-A3B"]["config"], CHECK_SIZES
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    folder = tmp_path_factory.mktemp("oracle") / "model"
    write_random_weights(folder, MODEL, seed=0)
    return Oracle(folder)


@pytest.fixture(scope="module")
def sampled(oracle):
    return sample_sequences(oracle, SAMPLING, seed=1, forced_experts=True)


def test_records_are_whole_and_of_every_kind(sampled) -> None:
    contract = ModelContract(MODEL["vocab_size"], (0, 1, 2, 3), 8, 3)
    for scored in sampled:
        check_rollout(scored.rollout, contract)
        assert np.allclose(scored.rollout.logprobs[scored.rollout.loss_mask], scored.log_probs)
    assert len(sampled) == NUM_SEQUENCES
    sizes = np.concatenate([s.rollout.set_sizes[s.rollout.loss_mask] for s in sampled])
    assert {0, 1} < set(sizes.tolist()) and sizes.max() > 3
    assert any(not s.rollout.loss_mask.any() for s in sampled)
    assert any(s.rollout.loss_mask.any() and not s.rollout.loss_mask.all() for s in sampled)


def test_experts_are_forced_where_they_are_recorded(oracle, sampled) -> None:
    rollout = sampled[0].rollout
    tokens = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
    forced, choices = oracle.logits(tokens, rollout.routed_experts)
    free, own = oracle.logits(tokens)
    assert (torch.stack(choices.chosen, 1)[:-1].numpy() == rollout.routed_experts).all()
    assert (forced - free).abs().max() > 0.1
    again, _ = oracle.logits(tokens, torch.stack(own.chosen, 1).numpy())
    assert torch.equal(again, free)


def test_gradients_have_the_names_of_a_checkpoint_and_leave_the_weights(oracle, sampled) -> None:
    before = {name: weight.clone() for name, weight in oracle.model.state_dict().items()}
    gradients = oracle.gradients(supervised_loss(oracle, sampled))
    assert gradients["model.layers.2.mlp.experts.3.up_proj.weight"].shape == (
        MODEL["moe_intermediate_size"],
        MODEL["hidden_size"],
    )
    assert float(gradients["model.layers.0.mlp.gate.weight"].norm()) > 0
    assert all(torch.equal(weight, before[name]) for name, weight in oracle.model.state_dict().items())


def test_keep_set_is_the_smallest_that_reaches_top_p() -> None:
    z = np.log(np.array([0.1, 0.5, 0.05, 0.35]))
    assert keep_set(z, Sampling(top_p=0.8)).tolist() == [1, 3]
    assert keep_set(z, Sampling(top_p=0.9)).tolist() == [1, 3, 0]
    assert keep_set(z, Sampling(top_p=0.9, top_k=1)).tolist() == [1]
    assert len(keep_set(z, Sampling())) == 4


def test_a_family_that_transformers_does_not_know_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("megatron_rl.preflight.oracle.transformers", SimpleNamespace(__version__="0.0"))
    with pytest.raises(UnknownFamilyError, match="no Qwen3MoeForCausalLM"):
        check_known_to_transformers(MODEL)
