"""Every family on the layouts that can break it: scores, routes and gradients of transformers' model, and the same bytes back.

One process against transformers in fp32, four processes in each layout against the one. Converted checkpoints are loaded by
Megatron's own dist-checkpointing, and those that the engine saves are converted back. Not shown: bf16 arithmetic, GPUs.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.conversion import HfCheckpoint, hf_to_megatron, megatron_to_hf
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.weight_mapping.family_cases import FamilyResult, examples_of, load_and_save, run_family
from tests.distributed.weight_mapping.transformers_model import Reference, save_random

DATA = Path(__file__).parents[2] / "data"
FAMILIES: dict[str, dict[str, Any]] = json.loads((DATA / "small_families.json").read_text())
FAMILIES |= {name: config for name, config in json.loads((DATA / "small_models.json").read_text()).items() if name == "qwen3_moe"}
# fp32: logits of size 10 after four layers carry some 1e-6 each.
LOG_PROB = 5e-5
# Relative to the gradient's own norm.
GRADIENT = 2e-4
MIXED = Layout(4, tp=2, pp=2, ep=2, first_stage_layers=1)
"""Cuts, stages of different sizes and spread experts at once: what every family passes."""
MORE_RANKS_THAN_GROUPS = Layout(4, tp=4)
"""Of query groups: ranks share keys and values, and their biases."""
PIPELINE_AND_CONTEXT = [Layout(4, pp=4), Layout(4, pp=2, vpp=2, ep=2), Layout(4, cp=4), Layout(4, tp=2, cp=2, ep=2)]
"""Latent attention and sinks need their own cases here. Other attention passes these layouts in engine/test_parity.py."""
LAYOUTS = {
    "qwen3_moe": [MIXED],
    "mixtral_moe": [MIXED, MORE_RANKS_THAN_GROUPS],
    "glm4_moe": [MIXED, MORE_RANKS_THAN_GROUPS],
    "gpt_oss_moe": [MIXED, MORE_RANKS_THAN_GROUPS, *PIPELINE_AND_CONTEXT],
    "deepseek_v3_moe": [MIXED, *PIPELINE_AND_CONTEXT],
    "moonlight_moe": [MIXED, *PIPELINE_AND_CONTEXT],
}
"""Chosen by injecting faults: docs/developing.md has the table. A new family begins with MIXED and MORE_RANKS_THAN_GROUPS."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "hf"
        save_random(folder, FAMILIES[name])
        return folder

    return of


@pytest.fixture(scope="module")
def single(one: RankPool, saved):
    @cache
    def of(name: str) -> FamilyResult:
        return one.run(run_family, saved(name), Layout())[0]

    return of


@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_is_transformers(single, saved, name: str) -> None:
    reference = Reference(saved(name))
    log_probs, gradients = reference.run(examples_of(FAMILIES[name]["vocab_size"]))
    found = single(name)
    for number, wanted in log_probs.items():
        np.testing.assert_allclose(found.log_probs[number], wanted.numpy(), rtol=0, atol=LOG_PROB)
    assert found.routes == reference.routes
    assert len(gradients) > 20
    for key, wanted in gradients.items():
        assert (found.gradients[key] - wanted).norm() < GRADIENT * wanted.norm(), key
    assert_bytes(found, saved(name))


def test_every_family_has_its_layouts() -> None:
    assert LAYOUTS.keys() == FAMILIES.keys()


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in FAMILIES for layout in LAYOUTS.get(name, ())], ids=str)
def test_every_layout_is_one_process(single, four: RankPool, saved, name: str, layout: Layout) -> None:
    wanted, ranks = single(name), four.run(run_family, saved(name), layout)
    scores = {number: values for rank in ranks for number, values in rank.log_probs.items()}
    assert scores.keys() == wanted.log_probs.keys()
    for number, values in scores.items():
        np.testing.assert_allclose(values, wanted.log_probs[number], rtol=0, atol=LOG_PROB)
    assert all(wanted.routes[key] == routes for rank in ranks for key, routes in rank.routes.items())
    for key, gradient in wanted.gradients.items():
        assert (ranks[0].gradients[key] - gradient).norm() <= GRADIENT * gradient.norm() + 1e-9, key
    assert_bytes(ranks[0], saved(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_loads_what_is_converted_and_converts_what_megatron_saves(
    four: RankPool, saved, name: str, tmp_path: Path
) -> None:
    hf_to_megatron(saved(name), tmp_path / "converted", shard_bytes=100_000)
    wrong = four.run(load_and_save, saved(name), tmp_path / "converted", tmp_path / "saved", Layout(4, tp=2, pp=2, ep=2))
    assert wrong == [[]] * 4
    (tmp_path / "saved" / "config.json").write_text((saved(name) / "config.json").read_text())
    megatron_to_hf(tmp_path / "saved", tmp_path / "back")
    source, back = HfCheckpoint.open(saved(name)), HfCheckpoint.open(tmp_path / "back")
    assert back.keys() == source.keys()
    assert all(torch.equal(back[key], source[key]) for key in source)


def assert_bytes(found: FamilyResult, folder: Path) -> None:
    source = HfCheckpoint.open(folder)
    assert found.weights.keys() == source.keys()
    for key, tensor in source.items():
        assert found.weights[key].dtype == tensor.dtype
        assert torch.equal(found.weights[key], tensor), key
