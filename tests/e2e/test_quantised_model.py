"""A run from FP8 weights with block scales, as DeepSeek-V3 and Kimi-K2 are published; here a small Qwen3-MoE."""

import json
import tomllib

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.conversion import HfCheckpoint, make_random_model
from tests.e2e.runs import CONFIG, PROGRAM, SMALL, run

BLOCK = 32


def write_fp8(folder, architecture) -> dict[str, torch.Tensor]:
    """Returns the values that the folder's weights stand for."""
    make_random_model(folder, architecture, seed=2)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    stored, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            continue
        rows, columns = (-(-size // BLOCK) for size in tensor.shape)
        scale = torch.rand(rows, columns) * 0.01 + 0.001
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        values[name] = (stored[name].float() * spread).to(torch.bfloat16)
    save_file(stored, file, metadata={"format": "pt"})
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": quantisation}))
    return values


def test_a_run_from_fp8_weights_trains_and_serves_the_values_that_they_stand_for(tmp_path):
    architecture = tomllib.loads(CONFIG.read_text())["model"]["architecture"]
    values = write_fp8(tmp_path / "fp8", {**architecture, "hidden_size": 64, "num_hidden_layers": 2})
    model = ["--model.architecture", "none", "--model.path", str(tmp_path / "fp8")]
    rate = ["--optimizer.learning_rate", "1e-30", "--run.steps", "2"]  # the weights stay what they are
    folder, words = tmp_path / "runs" / "fp8", [word for word in SMALL if word not in ("--model.architecture.hidden_size", "64")]
    name = ["--run.folder", str(folder.parent), "--run.name", folder.name]
    done = run([*PROGRAM, "train", str(CONFIG), *words, *name, *model, *rate])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first prompt: " in done.stdout + done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    # The servers sampled from what the trainer scores with: fp32, so what is left is rounding of another order of sums.
    assert summary["steps"] == 2 and summary["abs_dlogp_mean"] < 1e-5
    export = HfCheckpoint.open(folder / "export")
    assert "quantization_config" not in export.config and export.keys() == values.keys()
    for name, expected in values.items():
        # A step moves a weight by 1e-30 at most, which only a zero shows.
        assert (export[name].float() - expected.float()).abs().max() < 1e-29, name
