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
