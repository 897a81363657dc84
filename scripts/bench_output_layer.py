"""The output layer's share of a training step: with the keep-set log-softmax and with the dense masked log-softmax.

    python scripts/bench_output_layer.py [--config CONFIG] [--tokens 4096] [--repeats 5] [--json FILE] [--section.key value ...]

Trains the config's model (default: the demo's; for a larger one: --model.architecture.vocab_size 32768) on one rank with
Megatron's own forward pass, backward pass and optimizer, on random rollouts whose keep-sets have the published shape (half of
them singletons). Only the function from hidden states to log-probabilities differs between the two, and the steps alternate
between them; the script stops if their gradient norms or entropies differ.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from bench_keep_set import Problem, set_sizes
from torch import Tensor

from megatron_rl.batching import Alignment, AssemblyOptions, Microbatch
from megatron_rl.batching.collate import Member, collate
from megatron_rl.config import Config, load_config
from megatron_rl.conversion import random_hf_tensors
from megatron_rl.engine import build_engine, head, start_process
from megatron_rl.engine.timers import StartTimerInBackward, StopTimerInBackward, Timer
from megatron_rl.keep_set import KeepSetOutput, KeepSets, keep_set_log_probs
from megatron_rl.objective import Denominators, PolicyLoss
from megatron_rl.records import ModelContract, RaggedIds, Rollout, Sampling
from megatron_rl.weight_mapping import ParameterTable

DEMO = Path(__file__).parents[1] / "model_configs" / "tiny-moe-cpu.toml"
PROMPT, COMPLETION = 8, 56
LogProbs = Callable[..., KeepSetOutput]


def dense_masked(
    hidden: Tensor, weight: Tensor, sets: KeepSets, *, temperature: Tensor, vocab_size: int, **_: object
) -> KeepSetOutput:
    """All logits [N, V], those outside the sets masked, log-softmax: what Megatron-based trainers do. Zeros without a loss."""
    kept = torch.zeros(len(hidden), len(weight), dtype=torch.bool)
    rows = torch.repeat_interleave(torch.arange(len(hidden)), sets.keep_offsets.diff())
    kept[rows, sets.keep_ids.long()] = True
    has_loss = kept.any(1)
    kept[~has_loss, 0] = True  # a row of -inf alone would be NaN
    logits = (hidden @ weight.t()).float() / temperature[:, None]
    log_p = logits.masked_fill(~kept, float("-inf")).log_softmax(1)
    chosen = log_p.gather(1, torch.where(has_loss, sets.target_ids, 0)[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = torch.special.entr(log_p.exp()).sum(1)
    return KeepSetOutput(chosen * has_loss, entropy * has_loss)


def timed(compute: LogProbs, timer: Timer, hidden: Tensor, *arguments: object, **settings: object) -> KeepSetOutput:
    """The timer counts the forward and the backward pass of `compute`."""
    with timer:
        out = compute(StopTimerInBackward.apply(hidden, timer), *arguments, **settings)
        return KeepSetOutput(StartTimerInBackward.apply(out.log_probs, timer), out.entropy)


def random_microbatches(config: Config, table: ParameterTable, num_tokens: int) -> tuple[list[Microbatch], Denominators]:
    """Sequences of PROMPT + COMPLETION random tokens with random routes; the sets' sizes are of the published shape."""
    architecture, random = table.architecture, np.random.default_rng(0)
    vocab, contract = architecture.vocab_size, architecture.contract
    count = num_tokens // (PROMPT + COMPLETION)
    sizes = set_sizes(Problem("published", count * COMPLETION, vocab, 0)).clamp(max=vocab // 2).numpy().reshape(count, COMPLETION)
    members = [
        Member(n, random_rollout(contract, random, of_rollout), float(random.normal())) for n, of_rollout in enumerate(sizes)
    ]
    layers = tuple(range(contract.num_moe_layers))
    options = AssemblyOptions(contract, config.trainer.max_tokens_per_microbatch, sequence_parallel=False, moe_layers=layers)
    per_batch = config.trainer.max_tokens_per_microbatch // (PROMPT + COMPLETION)
    groups = [members[first : first + per_batch] for first in range(0, count, per_batch)]
    denominators = Denominators(tokens=count * COMPLETION, sequences=count)
    return [collate(group, 0, Alignment(1, 1), options) for group in groups], denominators


def random_rollout(contract: ModelContract, random: np.random.Generator, sizes: np.ndarray) -> Rollout:
    sets = [random.choice(contract.vocab_size, size, replace=False) for size in sizes]
    shape = (PROMPT + COMPLETION - 1, contract.num_moe_layers, contract.num_experts)
    return Rollout(
        uid="random", prompt_ids=random.integers(0, contract.vocab_size, PROMPT).astype(np.int32),
        completion_ids=np.array([kept[0] for kept in sets], dtype=np.int32),
        logprobs=-random.random(COMPLETION).astype(np.float32),
        keep_sets=RaggedIds.of(sets),
        routed_experts=random.random(shape).argsort(axis=-1)[..., : contract.experts_per_token].astype(np.uint8),
        policy_versions=np.zeros(COMPLETION, dtype=np.int32), loss_mask=np.ones(COMPLETION, dtype=bool),
        sampling=Sampling(top_p=0.95), finish_reason="stop", reward=0.0,
    )  # fmt: skip


def measure(config: Config, num_tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of the output layer and of the step, by arm."""
    hf_config = config.model.architecture
    with TemporaryDirectory() as folder:
        groups = start_process(config, 0, store=dist.FileStore(f"{folder}/store", 1))
        table = ParameterTable(hf_config)
        engine = build_engine(config, groups, hf_config, dict(random_hf_tensors(table, config.run.seed)))
        microbatches, denominators = random_microbatches(config, table, num_tokens)
        timer, seconds = Timer(groups.device), {"keep_set": [], "dense_masked": []}
        computed: dict[str, list[float]] = {}
        for step in range(repeats + 1):
            for arm, compute in (("keep_set", keep_set_log_probs), ("dense_masked", dense_masked)):
                head.keep_set_log_probs = partial(timed, compute, timer)
                began = time.perf_counter()
                metrics = engine.train_step(
                    microbatches, PolicyLoss(config.objective), denominators, step=step, learning_rate=0.0
                )
                seconds[arm].append((timer.read(), time.perf_counter() - began))
                computed[arm] = [metrics[name].value for name in ("grad_norm", "entropy_keep_set")]
        engine.close()
        dist.destroy_process_group()
    # The tolerance covers rounding of fp32, and of gradients of bf16 models.
    if not np.allclose(computed["keep_set"], computed["dense_masked"], rtol=1e-3):
        raise SystemExit(f"the arms differ in gradient norm or entropy: {computed}")
    names = ("output_layer_s", "step_s")
    return {arm: dict(zip(names, map(median, zip(*of_arm[1:], strict=True)), strict=True)) for arm, of_arm in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEMO)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each arm after one warm-up step")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments, overrides = parser.parse_known_args()
    one_rank = ["--layout.world_size", "1", "--layout.expert", "1", "--metrics.entropy_full_tokens", "0"]
    config = load_config(arguments.config, [*overrides, *one_rank])
    torch.manual_seed(0)
    found = measure(config, arguments.tokens, arguments.repeats)
    sizes = config.model.architecture
    print(
        f"V={sizes['vocab_size']} H={sizes['hidden_size']}, {sizes['num_hidden_layers']} layers, "
        f"{arguments.tokens} tokens a step, {torch.get_num_threads()} thread(s)"
    )
    for arm, numbers in found.items():
        numbers["share"] = numbers["output_layer_s"] / numbers["step_s"]
        print(
            f"{arm:13s} output layer {numbers['output_layer_s'] * 1e3:8.1f} ms "
            f"of a step of {numbers['step_s'] * 1e3:8.1f} ms: {numbers['share']:.1%}"
        )
    print(f"step_speedup = {found['dense_masked']['step_s'] / found['keep_set']['step_s']:.3g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
