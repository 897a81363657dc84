"""A plan written into a file, and the files of model_configs as the planner's answers."""

import re
import tomllib
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.planner import balance, candidate_of, machine_named, workload_of
from megatron_rl.planner.choice import values_of, with_value, write_choice
from tests.unit.planner.subject import PUBLISHED, ROOT, counts_of

COMMAND = re.compile(r"^# Layout: megatron-rl plan model_configs/(\S+) --gpus (\d+) --gpu-type (\S+)$", re.MULTILINE)
TEXT = '# top\n[layout]\nworld_size = 8  # all of them\npipeline = 4\n\n[trainer]\nrecompute = "none"\n'


def test_values_are_replaced_added_and_removed() -> None:
    text = with_value(with_value(with_value(TEXT, "layout", "world_size", 16), "layout", "pipeline", None), "layout", "expert", 8)
    text = with_value(with_value(text, "servers", "count", 2), "trainer", "recompute", "full")
    assert tomllib.loads(text) == {
        "layout": {"world_size": 16, "expert": 8}, "trainer": {"recompute": "full"}, "servers": {"count": 2},
    }  # fmt: skip
    assert text.startswith("# top\n") and "16  # all of them" in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layouts_of_model_configs_are_the_planners(name: str, tmp_path: Path) -> None:
    """The command in a file's comment gives what stands in the file, and writing it changes nothing."""
    file = ROOT / "model_configs" / f"{name.lower()}.toml"
    named, gpus, machine = COMMAND.search(file.read_text()).groups()
    config = load_config(file)
    plan = balance(counts_of(name), workload_of(config), machine_named(machine), int(gpus), 8, keep=1).plans[0]
    assert named == file.name
    chosen, written = plan.trainer.candidate, candidate_of(config)
    assert (chosen.layout, chosen.microbatch_tokens, chosen.recompute) == (
        written.layout,
        written.microbatch_tokens,
        written.recompute,
    )
    copy = tmp_path / file.name
    copy.write_text(file.read_text())
    assert write_choice(copy, plan) == config
    assert copy.read_text() == file.read_text()


def test_servers_with_expert_parallelism_get_vllms_argument() -> None:
    config = load_config(ROOT / "model_configs" / "qwen3-235b-a22b.toml")
    plan = balance(counts_of("Qwen3-235B-A22B"), workload_of(config), machine_named("h200"), 160, 8, keep=1).plans[0]
    assert plan.server.expert > 1
    assert values_of(plan, config)["servers"]["extra_arguments"] == ["--enable-expert-parallel"]


def test_the_nodes_of_a_file_that_has_some_follow_the_plan() -> None:
    """24 trainer GPUs are 3 nodes of 8; on nodes of 16 they are 2 with 12 each."""
    file = ROOT / "model_configs" / "mixtral-8x7b.toml"
    plan = balance(counts_of("Mixtral-8x7B"), workload_of(load_config(file)), machine_named("h200"), 40, 8, keep=1).plans[0]
    assert plan.trainer.candidate.layout.world_size == 24
    for per_node, nodes in ((8, 3), (16, 2)):
        config = load_config(file, ["--slurm.trainer.gpus_per_node", str(per_node)])
        assert values_of(plan, config)["slurm.trainer"] == {"nodes": nodes}
    without = load_config(ROOT / "model_configs" / "tiny-moe-cpu.toml")
    assert not any(section.startswith("slurm") for section in values_of(plan, without))  # nodes without GPUs
