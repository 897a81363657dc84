"""What the engine's tests work on: small models of each family with random weights, and random rollouts for them."""

import json
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batching import Microbatch, alignment_of, cut_routes, pack
from megatron_rl.batching.collate import Member, collate
from megatron_rl.batching.options import AssemblyOptions
from megatron_rl.config import Config
from megatron_rl.conversion import random_hf_tensors
from megatron_rl.objective import Denominators, PolicyLoss
from megatron_rl.records import ModelContract, RaggedIds, Rollout, Sampling
from megatron_rl.topology import Layout, RankCoords
from megatron_rl.weight_mapping import ParameterTable


def _models(file: str) -> dict[str, dict[str, Any]]:
    configs = json.loads((Path(__file__).parents[2] / "data" / file).read_text())
    # A standard deviation at which routers and attention are far from uniform, so that a mistake in either shows.
    return {name: {**config, "initializer_range": 0.25} for name, config in configs.items()}


MODELS = _models("small_models.json")
"""Those that every test of all models runs on."""
CONFIGS = MODELS | _models("small_families.json")
CONFIGS["deepseek_v3_mtp"] = CONFIGS["deepseek_v3_moe"] | {"num_nextn_predict_layers": 1}
MAX_TOKENS = 40


def config_of(
    model: str, parallel: Layout, /, *, recompute: str = "none", dtype: str = "float32", sequence_parallel: bool | None = None,
    **sections: dict[str, Any],
) -> Config:  # fmt: skip
    """sections: of the configuration, by name, on top of these."""
    tree: dict[str, Any] = {
        "run": {"name": "test", "steps": 10}, "task": {"name": "chain_sum"}, "rollouts": {"max_new_tokens": 16},
        "model": {"architecture": CONFIGS[model], "dtype": dtype, "max_sequence_length": MAX_TOKENS},
        "trainer": {"max_tokens_per_microbatch": MAX_TOKENS, "recompute": recompute},
        "layout": {
            "world_size": parallel.world_size, "tensor": parallel.tp, "pipeline": parallel.pp, "virtual_pipeline": parallel.vpp,
            "context": parallel.cp, "expert": parallel.ep, "expert_tensor": parallel.etp,
            **({} if sequence_parallel is None else {"sequence_parallel": sequence_parallel}),
        },
        "metrics": {"entropy_full_tokens": 0},
    }  # fmt: skip
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return Config.model_validate(tree)


def weights_of(model: str, seed: int = 0) -> dict[str, Tensor]:
    """As a fresh model has them, but with norms that differ from one, and selection biases from zero."""
    with_mtp = bool(CONFIGS[model].get("num_nextn_predict_layers"))
    weights = dict(random_hf_tensors(ParameterTable(CONFIGS[model], with_mtp=with_mtp), seed))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: w * (0.7 + 0.6 * torch.rand(w.shape, generator=generator)) if w.dim() == 1 else w for name, w in weights.items()
    }
    biases = {
        name: 0.2 * torch.randn(w.shape, generator=generator)
        for name, w in weights.items()
        if name.endswith("score_correction_bias")
    }
    return weights | biases


def contract_of(model: str) -> ModelContract:
    return ParameterTable(CONFIGS[model]).architecture.contract


def rollouts_of(model: str, seed: int = 0) -> list[Member]:
    """Nine sequences: keep-sets of all sizes, singletons, one untruncated, one with tool tokens, one without any loss token."""
    contract, random = contract_of(model), np.random.default_rng(seed)
    members = []
    for number in range(9):
        sampling = Sampling(top_p=1.0 if number == 3 else 0.9)
        mask = np.ones(int(random.integers(2, 9)), dtype=bool)
        mask[1:3] = number != 5
        mask &= number != 7
        rollout = _rollout(f"g{number}", contract, random, sampling, mask)
        members.append(Member(number=number, rollout=rollout, advantage=float(random.normal())))
    return members


def _rollout(uid: str, contract: ModelContract, random: np.random.Generator, sampling: Sampling, mask: np.ndarray) -> Rollout:
    vocab, num_completion, num_prompt = contract.vocab_size, len(mask), int(random.integers(1, 12))
    completion = random.integers(0, vocab, num_completion)
    sets = [
        _keep_set(random, vocab, token) if wanted and sampling.truncates else []
        for token, wanted in zip(completion, mask, strict=True)
    ]
    shape = (num_prompt + num_completion - 1, contract.num_moe_layers, contract.num_experts)
    return Rollout(
        uid=uid, prompt_ids=random.integers(0, vocab, num_prompt).astype(np.int32), completion_ids=completion.astype(np.int32),
        logprobs=np.where(mask, -random.random(num_completion), 0).astype(np.float32),
        keep_sets=RaggedIds.of(sets),
        routed_experts=random.random(shape).argsort(axis=-1)[..., : contract.experts_per_token].astype(np.uint8),
        policy_versions=np.zeros(num_completion, dtype=np.int32), loss_mask=mask, sampling=sampling, finish_reason="stop",
        reward=0.0,
    )  # fmt: skip


def _keep_set(random: np.random.Generator, vocab: int, token: int) -> list[int]:
    size = int(random.choice([1, 1, 2, 5, 30]))
    others = random.permutation(np.delete(np.arange(vocab), token))[: size - 1]
    return random.permutation(np.append(others, token)).tolist()


def options_of(model: str, *, moe_layers: tuple[int, ...], sequence_parallel: bool = False, **switches: bool) -> AssemblyOptions:
    return AssemblyOptions(contract_of(model), MAX_TOKENS, sequence_parallel=sequence_parallel, moe_layers=moe_layers, **switches)


def all_layers(model: str) -> tuple[int, ...]:
    return tuple(range(contract_of(model).num_moe_layers))


def microbatches_of(
    members: list[Member],
    layout: Layout,
    coords: RankCoords,
    options: AssemblyOptions,
    *,
    max_tokens: int = MAX_TOKENS,
    multiple_of: int = 1,
) -> list[Microbatch]:
    """Those of one rank, each with the routes of that rank's layers and tokens alone, padded to a multiple of `multiple_of`."""
    lengths = [member.rollout.num_tokens for member in members]
    multiple = layout.pp if layout.vpp > 1 else 1
    packing = pack(lengths, num_ranks=layout.dp, max_tokens=max_tokens, microbatch_multiple=multiple)[coords.dp]
    alignment = alignment_of(layout, options.sequence_parallel)
    alignment = replace(alignment, total=lcm(alignment.total, multiple_of))
    uncut = (collate([_with_routes(members[n], options) for n in numbers], 0, alignment, options) for numbers in packing)
    return [cut_routes(microbatch, layout, coords, sequence_parallel=options.sequence_parallel) for microbatch in uncut]


def _with_routes(member: Member, options: AssemblyOptions) -> Member:
    routes = member.rollout.routed_experts[:, list(options.moe_layers)]
    return replace(member, rollout=replace(member.rollout, routed_experts=routes))


def denominators_of(members: list[Member]) -> Denominators:
    return Denominators(tokens=sum(int(m.rollout.loss_mask.sum()) for m in members), sequences=len(members))


def loss_of(config: Config) -> PolicyLoss:
    return PolicyLoss(config.objective)
