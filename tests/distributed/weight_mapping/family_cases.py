"""What the ranks run for one family: scores, routes, gradients and the weights again, from a Hugging Face folder."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batching import AssemblyOptions, SupervisedExample, SupervisedPlan, supervised_microbatches
from megatron_rl.config import Config
from megatron_rl.conversion import open_checkpoint
from megatron_rl.engine import build_engine
from megatron_rl.engine.groups import parallel_layout
from megatron_rl.objective import Denominators, SupervisedLoss
from megatron_rl.records import ModelContract
from megatron_rl.topology import Layout

MAX_TOKENS = 48


@dataclass(frozen=True)
class FamilyResult:
    """Of one rank; sequences and layers by their number in the model."""

    log_probs: dict[int, np.ndarray]
    routes: dict[tuple[int, int], list[frozenset[int]]]
    """(sequence, MoE layer) to the experts of each token, where this rank sees all tokens of a microbatch."""
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def examples_of(vocab_size: int) -> tuple[SupervisedExample, ...]:
    """Six sequences of different lengths; of each all tokens but the first are scored."""
    random = np.random.default_rng(0)
    lengths = (17, 9, 23, 5, 12, 19)
    sampled = [random.integers(0, vocab_size, length).tolist() for length in lengths]
    return tuple(SupervisedExample((ids[0],), tuple(ids[1:])) for ids in sampled)


def config_of(folder: Path, layout: Layout, dtype: str = "float32") -> Config:
    return Config.model_validate(
        {
            "run": {"name": "family", "steps": 1},
            "task": {"name": "chain_sum"},
            "rollouts": {"max_new_tokens": 8, "top_k": 8},
            "model": {"path": str(folder), "dtype": dtype, "max_sequence_length": MAX_TOKENS},
            "trainer": {"max_tokens_per_microbatch": MAX_TOKENS},
            "layout": {
                "world_size": layout.world_size, "tensor": layout.tp, "pipeline": layout.pp, "virtual_pipeline": layout.vpp,
                "expert": layout.ep, "expert_tensor": layout.etp, "context": layout.cp,
                "first_stage_layers": layout.first_stage_layers, "last_stage_layers": layout.last_stage_layers,
            },
            "metrics": {"entropy_full_tokens": 0},
        }
    )  # fmt: skip


def run_family(rank: int, folder: Path, layout: Layout, dtype: str = "float32") -> FamilyResult:
    from megatron_rl.engine.diagnostics import full_gradients

    checkpoint = open_checkpoint(folder)
    config = config_of(folder, layout, dtype)
    with parallel_layout(layout) as groups, closing(build_engine(config, groups, checkpoint.config, checkpoint)) as engine:
        model = engine.table.architecture
        plan = SupervisedPlan(0, examples_of(model.vocab_size))
        contract = ModelContract(model.vocab_size, (), 0, 0)
        options = AssemblyOptions(contract, MAX_TOKENS, sequence_parallel=config.sequence_parallel, moe_layers=engine.moe_layers)
        microbatches = supervised_microbatches(plan, layout, groups.coords, options)
        seen: dict[int, list[Tensor]] = {}
        hooks = _watch_routers(engine, seen)
        scores = engine.score(microbatches)
        for hook in hooks:
            hook.remove()
        gradients = _copied(full_gradients(engine, microbatches, SupervisedLoss(), Denominators.of(plan)))
        log_probs = {}
        for microbatch, score in zip(microbatches, scores, strict=True):
            for number in np.unique(microbatch.sequence[microbatch.loss_mask]):
                log_probs[int(number)] = score.log_probs[microbatch.loss_mask & (microbatch.sequence == number)]
        routes = _routes(microbatches, seen) if layout.tp == layout.cp == 1 else {}
        return FamilyResult(log_probs, routes, gradients, _copied(engine.hf_tensors()))


def _watch_routers(engine: Any, seen: dict[int, list[Tensor]]) -> list[Any]:
    hooks = []
    for wrapped in engine.models:
        for layer in wrapped.module.decoder.layers:
            if hasattr(layer.mlp, "router"):
                into = seen.setdefault(layer.layer_number - 1, [])
                hooks.append(layer.mlp.router.register_forward_hook(lambda _, __, out, into=into: into.append(out[1].clone())))
    return hooks


def _routes(microbatches: list, seen: dict[int, list[Tensor]]) -> dict[tuple[int, int], list[frozenset[int]]]:
    found = {}
    for layer, maps in seen.items():
        for microbatch, chosen in zip(microbatches, maps, strict=True):
            for number in np.unique(microbatch.sequence[microbatch.sequence >= 0]):
                rows = chosen[torch.from_numpy(microbatch.sequence == number)]
                found[int(number), layer] = [frozenset(row.nonzero().flatten().tolist()) for row in rows]
    return found


def _copied(tensors: Any) -> dict[str, Tensor]:
    """On rank 0; {} elsewhere, after having taken part."""
    return {name: tensor.clone() for name, tensor in tensors if tensor is not None}


def load_and_save(rank: int, folder: Path, converted: Path, saved: Path, layout: Layout) -> list[str]:
    """Load `converted` by Megatron's own dist-checkpointing into a model of zeros, then save the engine.

    Returns the names of tensors that differ from `folder`.
    """
    from megatron.core import dist_checkpointing

    source = open_checkpoint(folder)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    with (
        parallel_layout(layout) as groups,
        closing(build_engine(config_of(folder, layout), groups, source.config, zeros)) as engine,
    ):
        state = {
            f"model{n}": m.module.sharded_state_dict(metadata={"non_homogeneous_layers": True})
            for n, m in enumerate(engine.models)
        }
        loaded = dist_checkpointing.load(state, str(converted))
        for number, model in enumerate(engine.models):
            model.module.load_state_dict(loaded[f"model{number}"])
        wrong = [held.name for held, tensor in engine.parameters if not torch.equal(tensor, held.shard_from_hf(source))]
        engine.save(saved, 0)
        return wrong
