"""What the search finds fits and divides; what it leaves out is slower or larger."""

from dataclasses import replace

import pytest

from megatron_rl.planner import balance, machine_named
from megatron_rl.planner.layouts import candidate_layouts, pipelines
from megatron_rl.planner.requests import named_candidate
from megatron_rl.planner.search import evaluate_candidate, room, search
from megatron_rl.weight_mapping import ParameterTable, Placement
from tests.unit.planner.subject import PUBLISHED, WORK, counts_of

H200 = machine_named("h200")


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "DeepSeek-V3"])
def test_the_best_layouts_divide_the_model_and_fit(name: str) -> None:
    counts = counts_of(name)
    searched = search(counts, WORK, H200, 128, 8, keep=3)
    assert len(searched.best) == 3
    assert [scored.seconds for scored in searched.best] == sorted(scored.seconds for scored in searched.best)
    for scored in searched.best:
        layout = scored.candidate.layout
        table = ParameterTable(PUBLISHED[name], padded_vocab_size=layout.padded_vocab_size(PUBLISHED[name]["vocab_size"]))
        Placement(table, layout)  # raises where it does not
        assert scored.memory.total <= room(H200)


def test_no_layout_that_was_looked_at_is_better() -> None:
    """The search against a plain walk over the same layouts."""
    counts = counts_of("Moonlight-16B-A3B")
    best = search(counts, WORK, H200, 8, 8, keep=1).best[0]
    for layout in candidate_layouts(counts.architecture, 8, 8, WORK.longest_sequence):
        for recompute in ("none", "selective", "full"):
            for tokens in (16384, 32768, 65536):
                scored = evaluate_candidate(
                    counts, WORK, H200, replace(best.candidate, layout=layout, recompute=recompute, microbatch_tokens=tokens)
                )
                if scored.memory.total <= room(H200):
                    assert scored.seconds >= best.seconds * 0.999


def test_what_does_not_fit_says_what_it_lacks() -> None:
    searched = search(counts_of("Kimi-K2"), WORK, H200, 32, 8)
    assert not searched.best
    _, memory = searched.nearest
    assert memory.total > room(H200)


def test_long_sequences_are_cut_over_ranks() -> None:
    long = replace(WORK, longest_sequence=131072, mean_response=60000.0)
    assert {layout.cp for layout in candidate_layouts(counts_of("Qwen3-30B-A3B").architecture, 16, 8, 131072)} == {1, 2, 4, 8, 16}
    assert search(counts_of("Qwen3-30B-A3B"), long, H200, 32, 8).best


def test_experts_with_biases_are_never_cut() -> None:
    found = list(candidate_layouts(counts_of("GPT-OSS-120B").architecture, 32, 8, 16384))
    assert {layout.etp for layout in found} == {1}  # the engine refuses the others
    assert {1, 2, 4, 8} <= {layout.tp for layout in found}


def test_pipelines_of_layers_that_do_not_divide() -> None:
    assert pipelines(48, 4) == ({"vpp": 1}, {"vpp": 2}, {"vpp": 3}, {"vpp": 4})
    for given in pipelines(61, 16):
        inner = 61 - given["first_stage_layers"] - given["last_stage_layers"]
        assert inner % 14 == 0


def test_more_accelerators_make_steps_shorter_and_both_sides_use_them() -> None:
    small, large = (balance(counts_of("Qwen3-30B-A3B"), WORK, H200, gpus, 8, keep=1).plans[0] for gpus in (16, 64))
    assert large.step_s < small.step_s
    for plan, gpus in ((small, 16), (large, 64)):
        assert plan.trainer.candidate.layout.world_size + plan.servers * plan.server.tensor <= gpus


def test_without_staleness_the_sides_take_turns() -> None:
    plan = balance(counts_of("Qwen3-30B-A3B"), replace(WORK, max_staleness=0), H200, 16, 8, keep=1).plans[0]
    assert plan.step_s == pytest.approx(plan.trainer_s + plan.rollouts_s)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("TP=2,QP=3", "QP is not known"),
        ("TP=two", "not a positive integer"),
        ("RECOMPUTE=half", "not known"),
        ("MICROBATCH=100", "never split"),
        ("TP=3", "not a multiple"),
    ],
)
def test_named_layouts_that_cannot_be(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        named_candidate(text, WORK, 16)


def test_a_named_layout() -> None:
    candidate = named_candidate("tp=2, PP=4, GPUS=32, recompute=full", WORK, 16)
    assert (candidate.layout.tp, candidate.layout.pp, candidate.layout.dp, candidate.recompute) == (2, 4, 4, "full")
