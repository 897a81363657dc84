"""The operation on vocabulary shards of 1, 2 and 4 Gloo processes against the float64 reference of the full vocabulary.

What it does not prove: NCCL, and Megatron's own gradient buffers (the engine's tests train with them).
"""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl.keep_set import KeepSets, TokenKind, entropy_full, keep_set_log_probs, shard_plan
from megatron_rl.records import ContractError
from tests.unit.keep_set.cases import GRADIENT_TOLERANCE, VALUE_TOLERANCE, Case, make_case, reference, relative_difference

WORLD = 4
SAMPLE = torch.tensor([5, 2])


def one_shard(case: Case) -> Case:
    """All sets on the rows of the first of four shards: three ranks have no pair at all."""
    return dataclasses.replace(case, keep_sets=make_case(3, num_tokens=24, vocab_size=12).keep_sets)


CASES = {
    "spanning": make_case(1, vocab_size=50, num_rows=56, full=0.15, sizes=(1, 1, 2, 3, 7, 20, 45)),
    "bf16": make_case(2, dtype=torch.bfloat16, full=0.15, sizes=(1, 2, 7, 45)),
    "one shard": one_shard(make_case(3)),
    "a shard of padding only": make_case(4, vocab_size=40, num_rows=56, full=0.15, sizes=(1, 2, 30)),
    "singletons only": make_case(5, sizes=(1,)),
}
ROUTES = {"by cost": shard_plan.CPU_COSTS, "pairs": shard_plan.RouteCosts(1e9, 1e9), "dense": shard_plan.RouteCosts(0.0, 0.0)}
RUNS = [
    (name, tp, sequence_parallel, fused, route)
    for name in CASES for tp in (1, 2, 4) for sequence_parallel in (False, True) for fused in (False, True) for route in ROUTES
]  # fmt: skip


def run_shard(case: Case, group: dist.ProcessGroup, sequence_parallel: bool, fused: bool) -> dict[str, torch.Tensor]:
    """This rank's values and gradients, with the hidden states and the weight that a rank of Megatron holds."""
    rank, size = group.rank(), group.size()
    hidden = (case.hidden.chunk(size)[rank] if sequence_parallel else case.hidden).clone().requires_grad_()
    weight = torch.nn.Parameter(case.weight.chunk(size)[rank].clone())
    if fused:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    layout = {"vocab_size": case.vocab_size, "group": group, "sequence_parallel": sequence_parallel}
    out = keep_set_log_probs(hidden, weight, case.keep_sets, temperature=case.temperature, entropy_has_gradient=True, **layout)
    ((out.log_probs * case.upstream).sum() + (out.entropy * case.upstream_entropy).sum()).backward()
    full = entropy_full(hidden, weight, SAMPLE, temperature=case.temperature, **layout)
    d_weight = weight.main_grad if fused else weight.grad
    return {
        "log_probs": out.log_probs.detach(),
        "entropy": out.entropy.detach(),
        "full": full,
        "d_hidden": hidden.grad,
        "d_weight": d_weight,
    }


def refused_by(case: Case, group: dist.ProcessGroup) -> str:
    """Every rank refuses a bad set itself, before any collective: none is left waiting."""
    targets = case.keep_sets.target_ids.clone()
    targets[case.keep_sets.sizes() > 1] = case.vocab_size  # in no set
    bad = dataclasses.replace(case.keep_sets, target_ids=targets)
    try:
        keep_set_log_probs(
            case.hidden, case.weight.chunk(WORLD)[group.rank()], bad, temperature=1.0, vocab_size=case.vocab_size, group=group
        )
    except ContractError as error:
        return error.rule
    return "nothing refused"


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    results = {}
    for name, tp, sequence_parallel, fused, route in RUNS:
        if rank < tp:
            shard_plan.CPU_COSTS = ROUTES[route]
            results[name, tp, sequence_parallel, fused, route] = run_shard(CASES[name], groups[tp], sequence_parallel, fused)
    results["refused"] = refused_by(CASES["spanning"], groups[WORLD])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("keep_set")
    mp.spawn(worker, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def references() -> dict[str, dict]:
    return {name: {**reference(case, with_entropy=True), "full": reference_full_entropy(case)} for name, case in CASES.items()}


def reference_full_entropy(case: Case) -> torch.Tensor:
    kinds = torch.full_like(case.keep_sets.kinds, TokenKind.FULL)
    no_ids, no_sets = torch.zeros(0, dtype=torch.int32), torch.zeros(len(kinds) + 1, dtype=torch.int64)
    full = dataclasses.replace(case, keep_sets=KeepSets(case.keep_sets.target_ids, kinds, no_ids, no_sets))
    return reference(full, with_entropy=False)["entropy"][SAMPLE]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_shards_together_equal_the_full_vocabulary(name, tp, sequence_parallel, results, references):
    """Whichever route, with main_grad and without."""
    wanted, dtype = references[name], CASES[name].hidden.dtype
    for run in [run for run in RUNS if run[:3] == (name, tp, sequence_parallel)]:
        ranks = [results[rank][run] for rank in range(tp)]
        for value in ("log_probs", "entropy", "full"):
            assert all(torch.equal(got[value], ranks[0][value]) for got in ranks), (run, value)
            assert relative_difference(ranks[0][value], wanted[value]) < VALUE_TOLERANCE[dtype], (run, value)
        d_hidden = torch.cat([got["d_hidden"] for got in ranks]) if sequence_parallel else ranks[-1]["d_hidden"]
        d_weight = torch.cat([got["d_weight"] for got in ranks])
        assert relative_difference(d_hidden, wanted["d_hidden"]) < GRADIENT_TOLERANCE[dtype], run
        assert relative_difference(d_weight, wanted["d_weight"]) < GRADIENT_TOLERANCE[dtype], run


def test_a_bad_set_is_refused_on_every_rank(results):
    assert all("the target is in its keep-set" in results[rank]["refused"] for rank in range(WORLD))
