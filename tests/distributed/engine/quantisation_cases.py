"""NVFP4 on the ranks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.precision import amax_of, fake_quantise, kernels
from tests.distributed.engine.cases import Run, Setting, by_sequence, copied, laid_out
from tests.distributed.engine.subject import CONFIGS, MODELS, weights_of

MODEL = "qwen3_moe in blocks"
"""Every input dimension, and half of it, is a multiple of 16."""
MODELS[MODEL] = CONFIGS[MODEL] = MODELS["qwen3_moe"] | {
    "hidden_size": 48,
    "moe_intermediate_size": 96,
    "intermediate_size": 64,
    "head_dim": 16,
}

QAT = {"precision": {"training": "qat", "rollouts": "nvfp4"}}


def packed_weights(rank: int, setting: Setting) -> dict[str, Tensor]:
    """What servers would be sent; on rank 0."""
    with laid_out(setting) as groups:
        return copied(Run(groups, setting, **QAT).engine.rollout_tensors())


def qat_against_loaded_values(rank: int, setting: Setting) -> tuple[list[dict[int, np.ndarray]], list[dict[str, Tensor]], bool]:
    """Scores and gradients of a quantised run, and of a plain one that was given the quantised values; whether weights stayed."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, **QAT)
        before, scores, gradients = run.weights(), run.log_probs(), run.gradients()
        stayed = all(torch.equal(tensor, before[name]) for name, tensor in run.weights().items())
        plain = Run(groups, setting)
        plain.engine.load_weights(fake_quantised(setting.model, run))
        return [scores, plain.log_probs()], [gradients, plain.gradients()], stayed


def fake_quantised(model: str, run: Run) -> dict[str, Tensor]:
    """The model's full tensors, quantised group by group with their own amax, without the engine."""
    weights, group_of = weights_of(model), run.engine._quantiser.selection.group_of
    amaxes: dict[str, Tensor] = {}
    for name, group in group_of.items():
        amaxes[group] = torch.maximum(amaxes.get(group, torch.zeros(())), amax_of(weights[name]))
    return {name: fake_quantise(w, amaxes[group_of[name]]) if name in group_of else w for name, w in weights.items()}


def quantisations_of_a_step(rank: int, setting: Setting) -> tuple[int, int, int]:
    """How many matrices were quantised by scoring and training on many microbatches, how many there are, and by the next step."""
    count = 0
    original = kernels.fake_quantise

    def counted(*arguments: Any) -> Tensor:
        nonlocal count
        count += 1
        return original(*arguments)

    kernels.fake_quantise = counted
    try:
        with laid_out(setting) as groups:
            run = Run(groups, setting, **QAT)
            assert len(run.microbatches) > 1
            run.log_probs()
            run.step()
            first = count
            run.step(1)
            return first, len(run.engine._quantiser._tensors), count - first
    finally:
        kernels.fake_quantise = original


def quantised_activations(rank: int, setting: Setting) -> list[dict[int, np.ndarray]]:
    """Scores with weights alone and with activations quantised, too; and whether a step with them is finite."""
    with laid_out(setting) as groups:
        section = {
            "precision": QAT["precision"] | {"activations": "nvfp4", "activation_amax": 64.0},
            "weight_sync": {"probe_tolerance": 1.0},
        }
        weights_only, both = Run(groups, setting, **QAT), Run(groups, setting, **section)
        scores = [
            weights_only.log_probs(),
            by_sequence(both.microbatches, [s.log_probs for s in both.engine.score(both.microbatches)]),
        ]
        assert np.isfinite(both.step()["grad_norm"])
        return scores


def refused(rank: int, setting: Setting, section: dict[str, Any]) -> str:
    with laid_out(setting) as groups:
        try:
            Run(groups, setting, precision=section)
        except ValueError as error:
            return str(error)
    return f"nothing, of {MODELS[setting.model]}"
