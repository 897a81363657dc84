"""Which deterministic runs on GPUs are refused because Transformer Engine would compute their attention unfused.

Not proved here: that Transformer Engine chooses as its source reads, and how much memory the choice takes.
"""

from itertools import pairwise

import pytest

from megatron_rl.batching import alignment_of
from megatron_rl.config import Config
from megatron_rl.engine import deterministic_attention
from megatron_rl.engine.deterministic_attention import MAX_SCORES, check_deterministic_attention, largest_scores
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.launch import prepare as preparation
from megatron_rl.processes.gpus import Gpu
from megatron_rl.weight_mapping import ParameterTable

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
QWEN = {
    "model_type": "qwen3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 65536,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 65536,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def run_of(longest: int, most: int, *, tp: int = 1, cp: int = 1, deterministic: bool = True) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "device": "cuda", "deterministic": deterministic},
            "model": {"path": "/m", "max_sequence_length": longest},
            "layout": {"world_size": tp * cp, "tensor": tp, "context": cp},
            "task": {"name": "t"},
            "rollouts": {"max_new_tokens": 1},
            "trainer": {"max_tokens_per_microbatch": most},
        }
    )


def check(config: Config, hf_config: dict, capability: tuple[int, int], *, flash: bool = False) -> None:
    check_deterministic_attention(config, ParameterTable(hf_config).architecture, capability, has_flash_attention=flash)


def test_the_boundary_is_transformer_engines():
    model = ParameterTable(QWEN).architecture
    assert largest_scores(run_of(8192, 8192), model) >= MAX_SCORES
    alone = run_of(5, 5)
    assert largest_scores(alone, model) == max((1 + (5 - s) // 2) * 16 * s * s for s in range(1, 6))
    two = run_of(4, 8, tp=2, deterministic=True)
    assert alignment_of(two.parallel_layout, two.sequence_parallel).total == 2
    assert largest_scores(two, model) == (2 + (8 - 4) // 2) * 8 * 16


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("most", [16, 61, 200])
def test_no_microbatch_has_more_scores(tp, cp, most):
    """Against each length that the longest sequence may have."""
    model = ParameterTable(QWEN).architecture
    for longest in range(2, most + 1):
        config = run_of(longest, most, tp=tp, cp=cp)
        alignment = alignment_of(config.parallel_layout, config.sequence_parallel)
        padding = int(alignment.total > 1)
        each = [(1 + (most - s) // 2 + padding) * (16 // tp) * alignment.padded(s) ** 2 for s in range(1, longest + 1)]
        assert largest_scores(config, model) == max(each)


@pytest.mark.parametrize(("hf_config", "capability"), [(QWEN, HOPPER), (GPT_OSS, BLACKWELL)])
def test_a_microbatch_of_exactly_that_many_scores_is_refused(monkeypatch, hf_config, capability):
    """As by Transformer Engine: >=."""
    config = run_of(300, 4096)
    scores = largest_scores(config, ParameterTable(hf_config).architecture)
    monkeypatch.setattr(deterministic_attention, "MAX_SCORES", scores + 1)
    check(config, hf_config, capability)
    monkeypatch.setattr(deterministic_attention, "MAX_SCORES", scores)
    with pytest.raises(UnsupportedModelError):
        check(config, hf_config, capability)


def smallest_refused(hf_config: dict, capability: tuple[int, int]) -> int | None:
    """Tokens of the longest sequence, in microbatches of 4096 tokens, from which on a run is refused."""

    def refused(longest: int) -> bool:
        try:
            check(run_of(longest, 4096), hf_config, capability)
        except UnsupportedModelError:
            return True
        return False

    answers = [refused(longest) for longest in range(100, 500)]
    assert all(not a or b for a, b in pairwise(answers))
    return answers.index(True) + 100 if any(answers) else None


@pytest.mark.parametrize(("hf_config", "capability"), [(QWEN, HOPPER), (QWEN, AMPERE), (GPT_OSS, HOPPER), (GPT_OSS, BLACKWELL)])
def test_it_is_refused_from_the_boundary_on(hf_config, capability):
    boundary = smallest_refused(hf_config, capability)
    model = ParameterTable(hf_config).architecture
    assert largest_scores(run_of(boundary - 1, 4096), model) < MAX_SCORES <= largest_scores(run_of(boundary, 4096), model)


@pytest.mark.parametrize(
    ("hf_config", "capability", "flash", "deterministic", "refused"),
    [
        (QWEN, HOPPER, False, True, "compute capability 9.0.*--flash-attn"),
        (QWEN, AMPERE, False, True, "compute capability 8.0.*--flash-attn"),
        (QWEN, HOPPER, True, True, None),
        (QWEN, AMPERE, True, True, None),
        (QWEN, BLACKWELL, False, True, None),
        (QWEN, HOPPER, False, False, None),
        (GPT_OSS, BLACKWELL, True, True, "sinks .*lower one of the two"),
        (GPT_OSS, BLACKWELL, True, False, None),
    ],
)
def test_what_helps(hf_config, capability, flash, deterministic, refused):
    config = run_of(4096, 16384, deterministic=deterministic)
    if refused is None:
        check(config, hf_config, capability, flash=flash)
        return
    with pytest.raises(UnsupportedModelError, match=refused) as raised:
        check(config, hf_config, capability, flash=flash)
    assert "2^30" in str(raised.value) and "max_tokens_per_microbatch = 16384" in str(raised.value)


def test_a_run_is_refused_before_it_has_a_folder(monkeypatch):
    """On a machine whose GPUs are Hopper's, by the check that `train` and --dry-run make first."""
    hopper = Gpu("0", "NVIDIA H100", "GPU-1", 81559, HOPPER, "580.1")
    monkeypatch.setattr(preparation, "query_gpus", lambda: (hopper,))
    config = run_of(4096, 16384)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": None, "architecture": QWEN})})
    monkeypatch.setattr(preparation, "has_flash_attention", lambda: False)
    with pytest.raises(UnsupportedModelError, match="--flash-attn"):
        preparation.prepare(config, None)
    monkeypatch.setattr(preparation, "has_flash_attention", lambda: True)
    assert preparation.prepare(config, None)["model_type"] == "qwen3"
