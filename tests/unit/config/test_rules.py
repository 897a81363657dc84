"""The rules between sections: each refuses what could not run, names the values, and lets what can run pass."""

import pytest
from pydantic import ValidationError

from megatron_rl.config import Config
from megatron_rl.records import Sampling
from megatron_rl.topology import Layout


def make(**sections):
    base = {"run": {"name": "r", "steps": 3}, "model": {"path": "/m"}, "task": {"name": "t"}}
    return Config.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


W4A4 = {"training": "qat", "rollouts": "nvfp4", "activations": "nvfp4"}
NATIVE = W4A4 | {"training": "native"}
BF16 = {"path": "/m", "dtype": "bfloat16"}

REFUSED = [
    ({"model": {"architecture": {}}}, "either path or architecture"),
    ({"model": {"path": None}}, "either path or architecture"),
    ({"task": {"file": "t.jsonl"}}, "either name"),
    ({"task": {"name": None}}, "either name"),
    ({"layout": {"world_size": 3, "tensor": 2}}, "use 4 ranks"),
    ({"layout": {"world_size": 2, "sequence_parallel": True}}, "needs layout.tensor > 1"),
    ({"layout": {"world_size": 4, "tensor": 2, "expert": 2, "sequence_parallel": False}}, "sequence_parallel = false"),
    ({"rollouts": {"max_new_tokens": 4096}}, "leaves no room for a prompt"),
    ({"trainer": {"max_tokens_per_microbatch": 4095}}, "never split over microbatches"),
    ({"rollouts": {"keep_set_source": "processed_logprobs", "top_k": 65}}, "top_k = 65"),
    ({"objective": {"old_policy": "rollout"}}, "would apply it twice"),
    ({"objective": {"correction_low": 2.0}}, "has to be below objective.correction_high"),
    ({"trainer": {"updates_per_step": 3}}, "not a multiple"),
    ({"trainer": {"collective_timeout_s": 300}}, "collective_timeout_s = 300 is not above weight_sync.timeout_s = 300"),
    ({"servers": {"first_port": 65535, "count": 2}}, "exceeds port 65535"),
    ({"servers": {"tensor": 6, "nodes": 4}}, "tensor = 6 is not a multiple of servers.nodes = 4"),
    ({"optimizer": {"learning_rate": float("inf")}}, "finite"),
    ({"servers": {"request_timeout_s": float("inf")}}, "finite"),
    ({"optimizer": {"min_learning_rate": 1.0}}, "min_learning_rate"),
    ({"optimizer": {"muon": {"qk_clip": 100.0}}}, "optimizer.name = 'adamw'"),
    ({"precision": {"training": "qat"}}, "use 'qat' or 'native' together with 'nvfp4', or set weight_sync.probe_tolerance"),
    ({"precision": {"rollouts": "nvfp4"}}, "trainer and servers hold different weights"),
    ({"precision": {"activations": "nvfp4"}}, "needs precision.training = 'qat' or 'native', not 'full'"),
    ({"run": {"device": "cpu"}, "precision": W4A4}, "set weight_sync.probe_tolerance to the difference"),
    (
        {"run": {"device": "cpu"}, "precision": {"training": "native"}},
        "needs a Blackwell GPU and Transformer Engine; on a CPU use 'qat'",
    ),
    (
        {"run": {"device": "cuda"}, "model": {"dtype": "float32"}, "precision": {"training": "qat", "rollouts": "nvfp4"}},
        "set model.dtype = 'bfloat16'",
    ),
    ({"run": {"device": "cuda"}, "precision": W4A4}, "set precision.training = 'native'"),
    (
        {"run": {"device": "cuda"}, "model": BF16, "precision": NATIVE, "weight_sync": {"transport": "gloo"}},
        "all others multiply them in full precision",
    ),
    (
        {"run": {"device": "cuda"}, "model": BF16, "precision": NATIVE | {"activations": "full"}},
        "multiply them in full precision (W4A16); set precision.activations = 'nvfp4' (W4A4)",
    ),
    (
        {"run": {"device": "cuda"}, "model": BF16, "precision": NATIVE | {"rollouts": "full"}},
        "precision.training = 'native' with precision.rollouts = 'full': trainer and servers hold different weights",
    ),
    ({"run": {"device": "cuda"}, "model": {"dtype": "float32"}, "precision": NATIVE}, "FP4 takes bfloat16"),
    (
        {"run": {"device": "cuda", "deterministic": True}, "model": BF16, "precision": NATIVE | {"backward": "nvfp4"}},
        "gradients are rounded at random; set precision.backward = 'full'",
    ),
    ({"precision": {"backward": "nvfp4"}}, "precision.backward = 'nvfp4' needs precision.training = 'native', not 'full'"),
    (
        {
            "run": {"device": "cuda"},
            "model": BF16,
            "precision": NATIVE,
            "slurm": {"trainer": {"environment": {"NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1"}}},
        },
        "slurm.trainer.environment sets NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    ),
    (
        {"run": {"device": "cuda"}, "slurm": {"trainer": {"environment": {"NCCL_ALGO": "Ring"}}}},
        "slurm.trainer.environment and slurm.rollouts.environment differ in NCCL_ALGO",
    ),
    (
        {"run": {"device": "cuda"}, "slurm": {"rollouts": {"environment": {"NCCL_PROTO": "Simple"}}}},
        "slurm.trainer.environment and slurm.rollouts.environment differ in NCCL_PROTO",
    ),
    *(
        ({"slurm": {role: {"environment": {name: value}}}}, says)
        for role, name, value, says in (
            ("trainer", "", "1", "'' is no name of an environment variable"),
            ("rollouts", "A B", "1", "'A B' is no name of an environment variable"),
            ("trainer", "A=B", "1", "'A=B' is no name of an environment variable"),
            ("trainer", "RANK", "1", "RANK is set by the program itself"),
            ("rollouts", "MEGATRON_RL_KEY", "1", "MEGATRON_RL_KEY is set by the program itself"),
            ("trainer", "CUDA_VISIBLE_DEVICES", "0", "CUDA_VISIBLE_DEVICES is set by the program itself"),
            ("trainer", "A", "b\0c", "cannot hold a NUL character"),
        )
    ),
    *(
        ({"slurm": {"time_limit": limit, "signal_before_end_s": seconds}}, f"which is {seconds} s: the job would be told")
        for limit, seconds in (("10", 600), ("10:30", 630), ("4:00:01", 14401), ("2-3", 183600), ("1-2:03:04", 93784))
    ),
]


@pytest.mark.parametrize(("sections", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_could_not_run_is_refused(sections, says):
    with pytest.raises(ValidationError) as caught:
        make(**sections)
    assert says in str(caught.value)


def test_several_broken_rules_are_said_together():
    with pytest.raises(ValidationError) as caught:
        make(objective={"old_policy": "rollout"}, trainer={"updates_per_step": 3})
    assert "would apply it twice" in str(caught.value) and "not a multiple" in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": {"old_policy": "rollout", "correction": "none"}},
        {"trainer": {"max_tokens_per_microbatch": 4096}},
        {"trainer": {"collective_timeout_s": 301}},
        {"servers": {"first_port": 65534, "count": 2}},
        {"slurm": {"time_limit": "10", "signal_before_end_s": 599}},
        {"slurm": {"time_limit": "0"}},  # sbatch: no limit
        {"slurm": {"trainer": {"environment": {"_a1": "", "NCCL_DEBUG": "a b\nc"}}}},
        {"rollouts": {"keep_set_source": "processed_logprobs", "top_k": 64}},
        {"layout": {"world_size": 4, "tensor": 2, "expert": 2}},
        {"run": {"device": "cpu"}, "precision": W4A4, "weight_sync": {"probe_tolerance": 0.5}},
        {"run": {"device": "cuda"}, "model": BF16, "precision": NATIVE},
        {"run": {"device": "cuda", "deterministic": True}, "model": BF16, "precision": NATIVE},
        {"run": {"device": "cuda"}, "model": BF16, "precision": NATIVE | {"backward": "nvfp4"}},
        {
            "run": {"device": "cuda"},
            "model": BF16,
            "precision": {"training": "native"},
            "weight_sync": {"probe_tolerance": 0.5},
        },
    ],
)
def test_the_edge_of_a_rule_passes(sections):
    make(**sections)


def test_derived_values():
    config = make(
        layout={"world_size": 8, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "expert": 2},
        rollouts={
            "prompts_per_step": 3,
            "samples_per_prompt": 5,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "max_new_tokens": 9,
        },
    )
    assert config.parallel_layout == Layout(world_size=8, tp=2, pp=2, ep=2, vpp=2)
    assert config.sequence_parallel and not make().sequence_parallel
    assert config.rollouts_per_step == 15
    assert config.sampling == Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=9)
    assert make(model={"dtype": "float32"}).probe_tolerance == 1e-4 and make().probe_tolerance == 0.1
    assert make(weight_sync={"probe_tolerance": 0.5}).probe_tolerance == 0.5


def test_sections_are_frozen():
    with pytest.raises(ValidationError):
        make().run.steps = 4
