"""A run's folder as the report reads it, with random rollouts and rows."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megatron_rl.batching import Spool
from megatron_rl.config import RunFolder, load_config
from megatron_rl.conversion.character_tokenizer import save_character_tokenizer
from megatron_rl.metrics import Row
from megatron_rl.metrics.rows import JsonLines
from megatron_rl.records import PlanEntry, RaggedIds, Rollout, Sampling, StepPlan, write_payload, write_scores

DEMO = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"
NAMES = (
    "reward_mean",
    "entropy_keep_set",
    "mismatch_kl_k1",
    "abs_dlogp_mean",
    "abs_dlogp_max",
    "ratio_mean",
    "grad_norm",
    "step_s",
    "sync_s",
)


def make_run(path: Path, *, steps: int, seed: int = 0, text: str = "2 * 3=") -> RunFolder:
    """Three rollouts a step, whose second completion token is a tool's; scores are kept of two."""
    folder, random = RunFolder(path), np.random.default_rng(seed)
    folder.create(load_config(DEMO))
    save_character_tokenizer(folder.model, 128, 512)
    tokenizer = Tokenizer.from_file(str(folder.model / "tokenizer.json"))
    spool, rows = Spool(path), JsonLines(folder.metrics_file)
    spool.create()
    for step in range(steps):
        rollouts = [
            _rollout(f"g{step}.{number}", random, tokenizer.encode(text).ids, tokenizer.encode("6=78").ids) for number in range(3)
        ]
        write_payload(spool.path(f"rollouts/g{step}.safetensors"), rollouts)
        entries = [
            PlanEntry(r.uid, step, f"rollouts/g{step}.safetensors", n, r.num_tokens, int(r.loss_mask.sum()), n - 1.0)
            for n, r in enumerate(rollouts)
        ]
        spool.write_plan(StepPlan(step, tuple(entries)))
        scores = {r.uid: np.where(r.loss_mask, r.logprobs + 0.25, np.nan).astype(np.float32) for r in rollouts[::2]}
        write_scores(folder.scores_file(step), scores)
        rows.write(Row(step, {name: float(random.random()) for name in NAMES}, seconds=3.0))
    rows.close()
    return folder


def _rollout(uid: str, random: np.random.Generator, prompt: list[int], kept: list[int]) -> Rollout:
    """Completion '6=7' with keep-sets {6, 7, 8}, none, {7}."""
    six, equals, seven, eight = kept
    loss_mask = np.array([True, False, True])
    return Rollout(
        uid=uid,
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=np.array([six, equals, seven], dtype=np.int32),
        logprobs=np.where(loss_mask, -random.random(3), 0).astype(np.float32),
        keep_sets=RaggedIds.of([[six, seven, eight], [], [seven]]),
        routed_experts=random.integers(0, 8, (len(prompt) + 2, 4, 2)).astype(np.uint8),
        policy_versions=np.array([4, 4, 5], dtype=np.int32),
        loss_mask=loss_mask,
        sampling=Sampling(top_p=0.9),
        finish_reason="stop",
        reward=0.5,
    )
