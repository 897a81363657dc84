"""Every configuration in model_configs is one that `launch` takes, at the nodes that its file states.

Not proved here: the model's folder, Slurm, GPUs.
"""

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.config import Config, ConfigError, load_config
from megatron_rl.launch.cli import app
from megatron_rl.launch.prepare import prepare
from megatron_rl.launch.submit import load_for_cluster, planned_devices
from tests.unit.processes.test_device_plan import assert_disjoint

REPOSITORY = Path(__file__).parents[3]
SHIPPED = sorted((REPOSITORY / "model_configs").glob("*.toml"))


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


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_model_and_layout_are_checked_before_the_model_is_fetched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = load_config(path)
    said = prepare(config, None, is_dry=True)
    if config.model.path is None:
        assert "config_json" not in said
        return
    published = f"model_configs/published/{path.stem}.json"
    assert str(said["config_json"]).startswith(f"model: read from {published}, as its authors publish it; model.path = ")
    with pytest.raises(ConfigError, match="does not exist; fetch the model's folder, and name it there"):
        prepare(config, None)


@pytest.mark.parametrize(
    ("name", "said"),
    [("kimi-k2", "a server spans several nodes; `megatron-rl launch CONFIG"), ("moonlight-16b-a3b", "# processes")],
)
def test_a_dry_run_of_a_shipped_config(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    result = CliRunner().invoke(app, ["train", f"model_configs/{name}.toml", "--dry-run", "--run.folder", str(tmp_path)])
    assert result.exit_code == 0 and said in result.output, result.output
    assert f"model: read from model_configs/published/{name}.json" in result.output and not list(tmp_path.iterdir())


def test_a_plan_says_which_config_json_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    result = CliRunner().invoke(app, ["plan", "model_configs/moonlight-16b-a3b.toml", "--gpus", "16"])
    assert result.exit_code == 0 and "model: read from model_configs/published/moonlight-16b-a3b.json" in result.output
