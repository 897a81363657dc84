"""The stand-in for CUDA, where it shows only in a separate process."""

from megatron_rl.engine.rank_pool import RankPool


def compiled_graphs(rank: int) -> int:
    """How often torch.compile is asked to compile the function that Megatron-Core hands it for GPT-OSS's gate."""
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    torch._dynamo.reset()
    quick_gelu(torch.ones(3))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_nothing_is_compiled_in_the_middle_of_a_step(one: RankPool) -> None:
    """Ranks that compile the same function at once were seen to load each other's half-written library."""
    assert one.run(compiled_graphs) == [0]
