"""Muon's step on a GPU is the CPU's. Skipped without a GPU. Not shown: several GPUs, and Megatron's fused optimizers around
it."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl.optim import DistributedMuon, HeldPiece, MuonRates, MuonSettings, Piece, assign_rounds, stage_tasks
from megatron_rl.processes import free_ports
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement
from tests.unit.optim.subject import SMALL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Relative to the update's norm. fp32: the iteration raises rounding (6e-8 times the root of a sum's length) by up to 485. bf16:
# each of fifteen products rounds to 2^-9 (0.036 on a CPU); gradients here are random, and so of full rank.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2}


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{free_ports(1)[0]}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def weights_after(device: str, dtype: torch.dtype, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Two steps of the same random gradients."""
    tasks = stage_tasks(Placement(ParameterTable(SMALL["qwen3_moe"]), Layout(1)), 0, 5)
    pieces = [Piece(task.parameter.name, 0, 1, 0, task.elements) for task in tasks]
    muon = DistributedMuon(
        MuonSettings(newton_schulz_dtype=dtype), assign_rounds(tasks, 1, 5000), pieces, group, torch.device(device)
    )
    generator = torch.Generator().manual_seed(0)
    weights = [torch.zeros(piece.length, device=device) for piece in pieces]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for _ in range(2):
        gradients = [torch.randn(piece.length, generator=generator).to(device) for piece in pieces]
        muon.step([HeldPiece(*of) for of in zip(weights, momenta, gradients, strict=True)], MuonRates(1.0, 0.1))
    return [weight.cpu() for weight in weights]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_gpu_steps_like_the_cpu(dtype: torch.dtype, group, monkeypatch, report) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    wanted = weights_after("cpu", torch.float32, group)
    for found, weight in zip(weights_after("cuda", dtype, group), wanted, strict=True):
        difference = ((found - weight).norm() / weight.norm()).item()
        report(**{f"update, {str(dtype).removeprefix('torch.')}": difference})
        assert difference < TOLERANCE[dtype]


def test_the_gpu_repeats_itself_to_the_bit(group) -> None:
    first, second = (weights_after("cuda", torch.float32, group) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
