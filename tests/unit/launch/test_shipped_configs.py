"""Every configuration in model_configs is one that `launch` takes, at the nodes that its file states.

Not proved here: the model's folder, Slurm, GPUs.
"""

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.config import Config
from megatron_rl.launch.cli import app
from megatron_rl.launch.submit import load_for_cluster, planned_devices
from tests.unit.processes.test_device_plan import assert_disjoint

SHIPPED = sorted((Path(__file__).parents[3] / "model_configs").glob("*.toml"))


def gpus_needed(config: Config) -> int:
    return config.layout.world_size + config.servers.count * config.servers.tensor if config.device == "cuda" else 0


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_launch_takes_it(path, tmp_path):
    result = CliRunner().invoke(app, ["launch", str(path), "--dry-run", "--run.folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    config = load_for_cluster(path, [], None)
    plan = planned_devices(config)
    assert_disjoint(plan)
    assert all(line in result.output for line in plan.lines())
    assert sum(len(a.devices) for a in plan.assignments) == gpus_needed(config)
    of_server = Counter(a.process.partition(".")[0] for a in plan.assignments if a.process.startswith("server-"))
    assert of_server == {f"server-{slot}": config.servers.nodes for slot in range(config.servers.count)}


@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-v3"])
def test_a_server_too_wide_for_the_nodes_is_refused(name, tmp_path):
    path = next(path for path in SHIPPED if path.stem == name)
    result = CliRunner().invoke(app, ["launch", str(path), "--dry-run", "--run.folder", str(tmp_path), "--servers.nodes", "2"])
    assert result.exit_code == 2 and "raise servers.nodes to 4" in result.output
