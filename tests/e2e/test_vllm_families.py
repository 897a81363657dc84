"""vLLM loads what the project exports, for every family that its CPU build computes, and agrees with the trainer on every token.

Hugging Face folder -> dist-checkpoint -> four trainer ranks at TP 2 x EP 2, and -> Hugging Face folder -> vLLM. Not shown:
GPT-OSS, whose sinks vLLM's CPU kernel reads as bf16 whatever the model's dtype; DeepSeek-V3 and Moonlight, of which a CPU kernel
refuses fp32 weights ("expect weight to be bfloat16, float16, int8, ..."); vLLM's quantised and fused kernels.
"""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.conversion import hf_to_megatron, megatron_to_hf
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.weight_mapping.family_cases import MAX_TOKENS, examples_of, run_family
from tests.distributed.weight_mapping.transformers_model import save_random

pytestmark = pytest.mark.slow
pytest.importorskip("vllm")

DATA = Path(__file__).parents[1] / "data"
SMALL: dict[str, dict[str, Any]] = {
    name: config
    for file in ("small_models.json", "small_families.json")
    for name, config in json.loads((DATA / file).read_text()).items()
}
# Sizes that vLLM's CPU kernels have.
HEADS = {"head_dim": 32, "hidden_size": 64}
FAMILIES = ("qwen3", "qwen3_moe", "llama", "mixtral_moe", "glm4_moe")
# fp32: logits of size 10 after four layers carry some 1e-6 each.
LOG_PROB = 5e-5


@pytest.fixture(scope="module")
def four():
    world = RankPool(4)
    yield world
    world.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_agrees_with_the_trainer_on_an_export(four: RankPool, family: str, tmp_path: Path) -> None:
    config = SMALL[family] | HEADS
    save_random(tmp_path / "source", config)
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    hf_to_megatron(tmp_path / "source", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "export")
    layout = Layout(4, tp=2, ep=2) if "moe" in family else Layout(4, tp=2)
    ranks = four.run(run_family, tmp_path / "megatron", layout)
    trained = {number: values for rank in ranks for number, values in rank.log_probs.items()}
    sequences = [[*e.prompt_ids, *e.solution_ids] for e in examples_of(config["vocab_size"])]
    served = served_log_probs(tmp_path / "export", sequences)
    assert sorted(trained) == list(range(len(sequences)))
    for number, values in trained.items():
        np.testing.assert_allclose(values, served[number], rtol=0, atol=LOG_PROB, err_msg=f"sequence {number}")


def served_log_probs(folder: Path, sequences: list[list[int]]) -> list[list[float]]:
    """Of all tokens but the first of each sequence, from a vLLM engine in a separate process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, sequences, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise AssertionError("the vLLM process ended without an answer; its output says why") from None
    finally:
        process.kill()
        process.join()


def _serve(folder: Path, sequences: list[list[int]], answer: Any) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=MAX_TOKENS,
        max_num_seqs=len(sequences), gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in sequences], parameters, use_tqdm=False)
    answer.send(
        [
            [place[token].logprob for place, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            for output, ids in zip(outputs, sequences, strict=True)
        ]
    )
