"""What the servers of a run are started with."""

import pytest

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator.commands import server_process
from megatron_rl.orchestrator.devices import local_plan
from megatron_rl.wire.nccl import DETERMINISTIC_NCCL


def environment_of_a_server(tmp_path, **run) -> dict[str, str]:
    sections = {
        "run": {"name": "t", "steps": 1, **run},
        "model": {"path": "/m", "max_sequence_length": 64},
        "task": {"name": "t"},
        "rollouts": {"max_new_tokens": 8},
    }
    config = Config.model_validate(sections)
    plan = local_plan(config, ["0", "1"] if config.device == "cuda" else [])
    return dict(server_process(config, RunFolder(tmp_path), plan, 0, "127.0.0.1", 8000, 0, "key", has_moe_layers=True).env)


@pytest.mark.parametrize(
    ("device", "deterministic", "agrees"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_servers_that_share_a_communicator_with_the_trainer_have_its_nccl_variables(tmp_path, device, deterministic, agrees):
    """That a trainer rank has them is in tests/unit/engine/test_determinism.py."""
    env = environment_of_a_server(tmp_path, device=device, deterministic=deterministic)
    assert (DETERMINISTIC_NCCL.items() <= env.items()) is agrees
    assert agrees or not DETERMINISTIC_NCCL.keys() & env.keys()
