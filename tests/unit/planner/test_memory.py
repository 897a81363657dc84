"""Terms that can be written down by hand, and how they move when a layout changes."""

from dataclasses import replace

import pytest

from megatron_rl.planner import Candidate, machine_named
from megatron_rl.planner.activations import layer_bytes
from megatron_rl.planner.memory import most_loaded, output_layer_bytes, rank_memory, static_terms
from megatron_rl.topology import Layout
from tests.unit.planner.subject import WORK, counts_of

H200 = machine_named("h200")
QWEN = counts_of("Qwen3-30B-A3B")
EIGHT = Candidate(Layout(8, ep=8), 16384, "none")


def test_adamw_in_bf16_takes_eighteen_bytes_on_one_rank() -> None:
    """2 + 4 + 4 + 8; buffers are filled up by less than a ten-thousandth."""
    terms = static_terms(QWEN, WORK, Candidate(Layout(1), 16384, "none"), 0)
    assert sum(terms.values()) == pytest.approx(18 * QWEN.num_parameters, rel=1e-4)


def test_muon_keeps_one_moment_of_the_matrices() -> None:
    adamw, muon = (static_terms(QWEN, replace(WORK, optimizer=name), EIGHT, 0) for name in ("adamw", "muon"))
    held = QWEN.chunk(EIGHT.layout, 0, 0)
    saved = 4 * (held.dense.matrices / 8 + held.expert.matrices)
    assert adamw["optimizer state"] - muon["optimizer state"] == pytest.approx(saved)


def test_quantised_copies_of_the_matrices() -> None:
    held = QWEN.chunk(EIGHT.layout, 0, 0)
    terms = static_terms(QWEN, replace(WORK, rollout_weights="nvfp4"), EIGHT, 0)
    matrices = held.dense.matrices + held.expert.matrices
    assert terms["quantised weights"] == 2 * matrices
    native = static_terms(QWEN, replace(WORK, rollout_weights="nvfp4", keeps_packed_weights=True), EIGHT, 0)
    assert native["quantised weights"] == 2.5625 * matrices


def test_activations_of_a_layer_by_hand() -> None:
    """Qwen3-30B-A3B, one rank, 1000 tokens, no imbalance, 2 bytes an entry unless said."""
    one = Candidate(Layout(1), 1000, "none")
    layer = layer_bytes(QWEN.architecture, replace(WORK, imbalance=1.0), one, 1000, sparse=True)
    h, q, kv, experts, width = 2048, 32 * 128, 4 * 128, 128, 768
    assert layer.stream == 2 * 1000 * h
    # Output of the norm; q, k, v and the output; q and k before their norms; fp32 row sums of the softmax.
    assert layer.attention == 1000 * (2 * (h + 2 * q + 2 * kv + q + kv) + 4 * 32)
    # Input and output of the norm; 8 rows of input, gate, up and product; the router's three fp32 tensors and a map of bytes.
    assert layer.mlp == 1000 * (2 * 2 * h + 2 * 8 * (h + 3 * width) + 13 * experts)


def test_recomputation_and_cutting_save_memory() -> None:
    by_recompute = [
        rank_memory(QWEN, WORK, replace(EIGHT, recompute=mode), H200, 0).terms["activations"]
        for mode in ("none", "selective", "full")
    ]
    assert by_recompute[0] > by_recompute[1] > by_recompute[2]
    tp1, tp2 = (rank_memory(QWEN, WORK, Candidate(Layout(8, tp=tp, ep=8), 16384, "none"), H200, 0) for tp in (1, 2))
    assert tp2.terms["activations"] == pytest.approx(tp1.terms["activations"] / 2, rel=0.05)
    cp2 = rank_memory(QWEN, WORK, Candidate(Layout(8, cp=2, ep=8), 16384, "none"), H200, 0)
    assert cp2.terms["activations"] == pytest.approx(tp1.terms["activations"] / 2, rel=0.05)


def test_imbalance_fills_the_busiest_rank() -> None:
    even, uneven = (most_loaded(QWEN, replace(WORK, imbalance=value), EIGHT, H200).gib for value in (1.0, 2.0))
    assert uneven > even + 1


def test_the_first_stages_keep_most_microbatches() -> None:
    candidate = Candidate(Layout(32, pp=4, ep=8), 16384, "none")
    memories = [rank_memory(QWEN, WORK, candidate, H200, stage) for stage in range(4)]
    activations = [memory.terms["activations"] for memory in memories]
    assert activations[0] > activations[1] > activations[2] > activations[3]
    assert most_loaded(QWEN, WORK, candidate, H200).stage == 0
    assert memories[3].terms["output layer"] > 0 == memories[2].terms["output layer"]


def test_the_output_layer_without_logits() -> None:
    heads = output_layer_bytes(QWEN, WORK, EIGHT)
    assert heads["dense"] > 16384 * 151936 * 10 > 20 * heads["chunked"]
    assert heads["keep-set"] < heads["chunked"] < heads["dense"]
