"""transformers' own checkpoints through every layout and back, to the bit.

transformers writes the checkpoints, so it decides names, shapes and contents. The ranks are simulated: each one's shards are
taken as it would take them, then brought together from the owners. That Megatron computes the same logits is not shown here.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_rl.conversion import HfCheckpoint, hf_tensors, write_hf_checkpoint
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import Parameter, ParameterTable, Placement

MODELS = {
    name: config
    for file in ("small_models.json", "small_families.json")
    for name, config in json.loads((Path(__file__).parents[2] / "data" / file).read_text()).items()
}
DENSE = [
    Layout(),
    Layout(world_size=2, tp=2),
    Layout(world_size=4, tp=4),
    Layout(world_size=2, pp=2),
    Layout(world_size=4, pp=4),
    Layout(world_size=2, pp=2, vpp=2),
    Layout(world_size=8, tp=2, pp=2, cp=2),
]
SPARSE = [
    Layout(world_size=2, ep=2),
    Layout(world_size=4, ep=4),
    Layout(world_size=4, tp=2, etp=2, ep=2),
    Layout(world_size=4, etp=2, ep=2),
    Layout(world_size=4, tp=4, etp=4),
    Layout(world_size=8, tp=2, pp=2, ep=2, vpp=2),
    Layout(world_size=16, tp=4, pp=4, ep=2, etp=2),
]
CASES = [
    (model, layout)
    for model in MODELS
    for layout in DENSE + (SPARSE if "moe" in model else [])
    # Biases of experts are not cut; four of the models have as many experts or heads as the largest layout asks for, or fewer.
    if not ("gpt_oss" in model and layout.etp > 1)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per model, as save_pretrained writes it; bf16 for one of them."""
    folders = {}
    torch.manual_seed(0)
    for name, config in MODELS.items():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        for parameter in model.parameters():
            # Norms too: all ones would hide a norm at another's place.
            torch.nn.init.normal_(parameter)
        folders[name] = tmp_path_factory.mktemp(name)
        model.to(torch.bfloat16 if name == "qwen3" else torch.float32).save_pretrained(folders[name], max_shard_size="60KB")
    return folders


@pytest.mark.parametrize("model", MODELS)
def test_transformers_has_the_same_names_and_shapes(saved: dict[str, Path], model: str) -> None:
    checkpoint = HfCheckpoint.open(saved[model])
    table = ParameterTable(checkpoint.config)
    checkpoint.check(table)
    assert {name: stored.spec.shape for name, stored in checkpoint.stored.items()} == table.hf_shapes
    # What transformers wrote into config.json means what the original config meant.
    assert table.architecture == ParameterTable(MODELS[model]).architecture


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_there_and_back(saved: dict[str, Path], model: str, layout: Layout) -> None:
    checkpoint = HfCheckpoint.open(saved[model])
    padded = layout.padded_vocab_size(MODELS[model]["vocab_size"])
    placement = Placement(ParameterTable(checkpoint.config, padded_vocab_size=padded), layout)
    ranks = [
        {held.parameter.name: held.shard_from_hf(checkpoint) for held in placement.held_by(rank).values()}
        for rank in range(layout.world_size)
    ]

    def gather(parameter: Parameter) -> list[torch.Tensor]:
        return [ranks[rank][parameter.name] for rank in placement.owners(parameter)]

    back = dict(hf_tensors(placement.table, gather))
    assert back.keys() == checkpoint.keys()
    for name, tensor in back.items():
        assert tensor.dtype == checkpoint[name].dtype
        assert torch.equal(tensor, checkpoint[name])
    for parameter in placement.table.parameters:
        size = len(placement.owners(parameter))
        full = parameter.from_hf(checkpoint)
        assert torch.equal(parameter.shard(full, size - 1, size), gather(parameter)[-1])


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_what_is_written(saved: dict[str, Path], model: str, tmp_path: Path) -> None:
    checkpoint = HfCheckpoint.open(saved[model])
    dtype = next(iter(checkpoint.values())).dtype
    out = tmp_path / "out"
    write_hf_checkpoint(out, checkpoint.items(), checkpoint.config, dtype=dtype, assets_from=saved[model], shard_bytes=60_000)
    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True) for folder in (saved[model], out)
    )
    assert not any(second[1].values())
    assert second[0].dtype == dtype
    weights = second[0].state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in first[0].state_dict().items())
    assert (out / "generation_config.json").read_bytes() == (saved[model] / "generation_config.json").read_bytes()
    index, theirs = (json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (out, saved[model]))
    assert index["metadata"] == theirs["metadata"]
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
