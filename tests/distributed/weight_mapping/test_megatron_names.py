"""The names and shapes that the placement predicts are those that Megatron-Core builds, on every rank of every layout.

One process plays all ranks in turn: torch's fake process group gives Megatron a rank and a world size without any partner, and
building a model communicates nothing; the published models are built on the meta device, at the layouts of model_configs. Values,
and the names of Transformer Engine's modules, are not shown here.
"""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import Config, load_config
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement

ROOT = Path(__file__).parents[3]
MODELS = {
    name: config
    for file in ("small_models.json", "small_families.json")
    for name, config in json.loads((ROOT / "tests" / "data" / file).read_text()).items()
}
PUBLISHED = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())
LAYOUTS = [
    Layout(),
    Layout(world_size=4, tp=4),  # more than the query groups of some of the models
    Layout(world_size=4, pp=4),
    Layout(world_size=2, pp=2, vpp=2),
    Layout(world_size=3, pp=3, last_stage_layers=2),
    Layout(world_size=4, ep=4),
    Layout(world_size=4, tp=2, etp=2, ep=2),
    Layout(world_size=4, cp=2, ep=4),
    Layout(world_size=4, tp=4, etp=2, ep=2),
    Layout(world_size=8, tp=2, pp=2, ep=2, vpp=2),
]
CASES = [
    (name, layout)
    for name in MODELS
    for layout in LAYOUTS
    if ("moe" in name or layout.ep == layout.etp == 1) and not ("gpt_oss" in name and layout.etp > 1)  # biases of experts
]
Shapes = dict[tuple[int, str], tuple[int, ...]]


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """The stand-in for CUDA changes torch for the entire process, so it runs in a separate one."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_every_rank_builds_the_parameters_of_the_placement(
    other_process: ProcessPoolExecutor, model: str, layout: Layout
) -> None:
    ranks = list(range(layout.world_size))
    built = other_process.submit(built_by_megatron, MODELS[model], config_of(layout), ranks).result()
    placement = place(MODELS[model], layout)
    for rank in ranks:
        assert built[rank] == {key: held.shape for key, held in placement.held_by(rank).items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_on_the_ranks_of_their_layout(other_process: ProcessPoolExecutor, name: str) -> None:
    """The first rank of the first, of a middle and of the last stage; the others of a stage hold as much."""
    config = load_config(ROOT / "model_configs" / f"{name.lower()}.toml")
    layout = config.parallel_layout
    ranks = sorted({stage * layout.ranks_per_stage for stage in (0, layout.pp // 2, layout.pp - 1)})
    built = other_process.submit(built_by_megatron, PUBLISHED[name]["config"], config, ranks).result()
    placement = place(PUBLISHED[name]["config"], layout)
    for rank in ranks:
        assert built[rank] == {key: held.shape for key, held in placement.held_by(rank).items()}


def place(hf_config: dict[str, Any], layout: Layout) -> Placement:
    return Placement(ParameterTable(hf_config, padded_vocab_size=layout.padded_vocab_size(hf_config["vocab_size"])), layout)


def config_of(layout: Layout) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "names", "steps": 1, "device": "cpu"},
            "model": {"path": "unused", "dtype": "float32", "max_sequence_length": 64},
            "task": {"name": "chain_sum"},
            "rollouts": {"max_new_tokens": 8, "top_k": 8},
            "layout": {
                "world_size": layout.world_size, "tensor": layout.tp, "pipeline": layout.pp, "virtual_pipeline": layout.vpp,
                "context": layout.cp, "expert": layout.ep, "expert_tensor": layout.etp,
                "first_stage_layers": layout.first_stage_layers, "last_stage_layers": layout.last_stage_layers,
            },
        }
    )  # fmt: skip


def built_by_megatron(hf_config: dict[str, Any], config: Config, ranks: list[int]) -> dict[int, Shapes]:
    """Shape of each parameter, and of each buffer that belongs to the model, by (chunk, name), for each rank."""
    from megatron_rl.engine import cpu

    cpu.install()
    import torch

    from megatron_rl.engine.model import Backend, build_chunks, tensor_of

    placement, found = place(hf_config, config.parallel_layout), {}
    padded = placement.table["embedding.word_embeddings.weight"].shape[0]
    for rank in ranks:
        with megatron_as(config.parallel_layout, rank) as groups, torch.device("meta"):
            backend = Backend.of(torch.device("cpu"))
            chunks = build_chunks(placement.table.architecture, config, groups, backend, padded_vocab_size=padded)
        found[rank] = {
            (number, name): tuple(p.shape) for number, chunk in enumerate(chunks) for name, p in chunk.named_parameters()
        }
        for (number, name), held in placement.held_by(rank).items():
            if held.parameter.dtype is not None:
                found[rank][number, name] = tuple(tensor_of(chunks[number], name).shape)
    return found


@contextmanager
def megatron_as(layout: Layout, rank: int) -> Iterator[Any]:
    """Megatron's process groups as they are on one rank, without the others."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rl.engine.groups import ParallelGroups

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    ps.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,  # the one thing that would wait for the others
    )
    own = dist.group.WORLD
    try:
        yield ParallelGroups(layout, layout.coords_of(rank), torch.device("meta"), tp=own, pp=own, cp=own, dp_cp=own)
    finally:
        ps.destroy_model_parallel()
        dist.destroy_process_group()
