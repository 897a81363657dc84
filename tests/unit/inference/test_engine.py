"""The contract of an inference engine: another one than vLLM drives a run; what an engine does not offer is refused by name."""

import inspect
import json
import subprocess
import sys

import pytest

from megatron_rl.config import Config
from megatron_rl.inference import registry
from megatron_rl.inference.engine import InferenceEngine
from megatron_rl.inference.errors import UnsupportedByEngineError
from megatron_rl.inference.vllm.engine import VllmEngine
from tests.architecture.source import REPOSITORY
from tests.unit.inference.tiny_engine import TinyEngine

UPDATE = ["/pause", "/start_update", "/receive", "/finish_update", "/reset_prefix_cache", "/resume"]


def test_a_run_on_another_engine_needs_nothing_of_vllm(tmp_path):
    """Not proved here: that a trainer's engine agrees with such an engine; the trainer is a stand-in."""
    command = [sys.executable, "-m", "tests.unit.inference.tiny_run", str(tmp_path)]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    run = json.loads(process.stdout.splitlines()[-1])
    assert run["finished"] and run["versions"][:3] == [0, 1, 2]
    assert len(run["consumed"]) == 3 * 4 * 2 and set(run["consumed"]) <= {0, 1, 2}
    last = run["versions"][-1]
    assert run["server"]["version"] == last and run["server"]["weights"] == {"a": 2.0 * last, "b": 3.0 * last}
    assert run["server"]["calls"] == UPDATE * len(run["versions"])
    assert run["of_vllm"] == []


def config(**sections) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "device": "cpu"},
            "model": {"path": "/m", "max_sequence_length": 64},
            "task": {"name": "t"},
            "rollouts": {"max_new_tokens": 8},
            **sections,
        }
    )


def test_vllm_is_the_engine_unless_another_is_asked_for():
    assert registry.engine_of(config()).name == "vllm"


def test_an_engine_that_nobody_has_registered_is_refused():
    with pytest.raises(UnsupportedByEngineError, match="servers.engine = 'sglang'; choose one of vllm"):
        registry.engine_of(config(servers={"engine": "sglang"}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "rollouts.keep_set_source = 'processed_logprobs': tiny offers native with run.device = 'cpu'; choose one of these"),
        (
            {"rollouts": {"max_new_tokens": 8, "keep_set_source": "native"}, "weight_sync": {"transport": "nccl"}},
            "weight_sync.transport = 'nccl': tiny offers gloo with run.device = 'cpu'; choose one of these",
        ),
    ],
)
def test_what_an_engine_does_not_offer_is_refused(monkeypatch, sections, message):
    monkeypatch.setitem(registry.ENGINES, "tiny", TinyEngine)
    with pytest.raises(UnsupportedByEngineError, match=message):
        registry.engine_of(config(servers={"engine": "tiny"}, **sections))


@pytest.mark.parametrize(("device", "transport", "offered"), [("cuda", "gloo", "nccl"), ("cpu", "nccl", "gloo")])
def test_vllm_has_one_transport_on_each_device(device, transport, offered):
    """The plugin's Gloo engine knows the CPU build alone; what would happen there is not found out in the middle of a run."""
    sections = {"run": {"name": "t", "steps": 1, "device": device}, "rollouts": {"max_new_tokens": 8}}
    message = f"weight_sync.transport = '{transport}': vllm offers {offered} with run.device = '{device}'"
    with pytest.raises(UnsupportedByEngineError, match=message):
        registry.engine_of(config(**sections, weight_sync={"transport": transport}))
    registry.engine_of(config(**sections))


def test_the_tiny_engine_offers_all_of_the_contract():
    offered = [name for name in vars(InferenceEngine) if not name.startswith("_")]
    assert len(offered) > 5 and [name for name in offered if not hasattr(TinyEngine, name)] == []
    methods = [name for name in offered if inspect.isfunction(vars(InferenceEngine)[name])]
    for engine in (TinyEngine, VllmEngine):
        for name in methods:
            asked, taken = (list(inspect.signature(getattr(of, name)).parameters) for of in (InferenceEngine, engine))
            assert taken == asked, name
