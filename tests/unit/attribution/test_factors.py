"""Which changes apply to which run, with the reasons of those that do not."""

from pathlib import Path

import pytest

from megatron_rl.attribution.factors import Factor, factors, hypotheses, residual
from megatron_rl.config import Config, load_config
from megatron_rl.weight_mapping import ParameterTable
from tests.unit.attribution.record import record

CONFIG = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"
OF_EXPERTS = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def config(*words: str) -> Config:
    return load_config(CONFIG, list(words))


def without_experts() -> dict[str, object]:
    return {key: value for key, value in config().model.architecture.items() if key not in OF_EXPERTS} | {"model_type": "qwen3"}


def named(loaded: Config, of_record, known: frozenset[int] = frozenset({3}), hf_config=None) -> dict[str, Factor]:
    return {f.name: f for f in factors(loaded, hf_config or loaded.model.architecture, of_record, known)}


def test_each_change_is_one_change() -> None:
    loaded = config()
    found = named(loaded, record(temperature=0.7, stale=True), frozenset({1, 2, 3}))
    assert list(found) == [
        "routing replay off", "keep-set replay off", "temperature 1", "staleness 0", "quantisation off", "dropout 0.1",
        "another layout: one rank",
    ]  # fmt: skip
    base = vars(residual(loaded, ParameterTable(loaded.model.architecture).architecture, knows_versions=False))
    for name in ("routing replay off", "keep-set replay off", "temperature 1", "staleness 0", "dropout 0.1"):
        changed = {key for key, value in vars(found[name].scoring).items() if value != base[key]}
        assert len(changed) == 1, (name, changed)
    assert found["another layout: one rank"].config.layout.world_size == 1


def test_what_does_not_apply_says_why() -> None:
    found = named(config(), record(set_size=0, stale=True), hf_config=without_experts())
    assert {name: f.reason for name, f in found.items() if f.reason} == {
        "routing replay off": "the model has no experts",
        "keep-set replay off": "no token has a keep-set: top_p is 1 and there is no top_k",
        "temperature 1": "every rollout was sampled at temperature 1",
        "staleness 0": "the weights of version 1, 2 are not known: no checkpoint at or before them within --retrain steps",
        "quantisation off": "neither training nor rollouts are quantised",
    }
    assert "all tokens were sampled by" in named(config(), record())["staleness 0"].reason


@pytest.mark.parametrize(
    ("words", "name", "precision"),
    [
        (["--precision.training", "qat", "--precision.rollouts", "nvfp4"], "quantisation off in training", "full"),
        (["--precision.rollouts", "nvfp4", "--weight_sync.probe_tolerance", "1"], "quantisation on in training", "qat"),
    ],
)
def test_quantisation_is_the_configuration_of_the_ranks(words, name, precision) -> None:
    changed = named(config(*words), record())[name]
    assert changed.config.precision.training == precision and changed.scoring is None


def test_a_run_without_a_replay_is_scored_with_it() -> None:
    loaded = config("--objective.routing_replay", "false", "--objective.keep_set_replay", "false")
    found = named(loaded, record())
    assert found["routing replay on"].scoring.routing_replay and found["keep-set replay on"].scoring.keep_set_replay
    left = residual(loaded, ParameterTable(loaded.model.architecture).architecture, knows_versions=True)
    assert left.routing_replay and left.keep_set_replay and left.weights == "sampled"


def test_one_rank_is_compared_with_two_in_the_way_that_fits() -> None:
    one = config("--layout.world_size", "1", "--layout.expert", "1")
    assert named(one, record())["another layout: tensor 2"].config.layout.tensor == 2
    odd = {**one.model.architecture, "num_key_value_heads": 1, "num_attention_heads": 3}
    assert named(one, record(), hf_config=odd)["another layout: expert 2"].config.layout.expert == 2
    on_gpu = config("--layout.world_size", "1", "--layout.expert", "1", "--run.device", "cuda")
    assert "second GPU" in named(on_gpu, record())["another layout"].reason


def test_faults_that_a_run_cannot_have_are_not_tried() -> None:
    loaded = config()
    dense = ParameterTable(without_experts()).architecture
    left = residual(loaded, dense, knows_versions=True)
    assert [bool(h.reason) for h in hypotheses(dense, record(), left)] == [True] * 4 + [False]
    experts = ParameterTable(loaded.model.architecture).architecture
    assert not any(h.reason for h in hypotheses(experts, record(temperature=0.5), left))
