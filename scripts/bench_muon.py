"""Muon's optimizer step compared with AdamW's and naive Muon's, measured on two CPU processes; and its work at scale, computed.

    python scripts/bench_muon.py [--json FILE] [--quick] [--repeats N]

Measured, at DP 2 and at TP 2 on the demo's model: the seconds of one optimizer step (gradient norm, update, all-gather of the
weights; the median over the steps of the slowest rank's time). Arms: adamw, Megatron's distributed optimizer; muon, this
project's; naive_muon, the same but every rank gathers all gradients and orthogonalises everything.

Computed, for Qwen3-235B and Kimi-K2 from 32 to 1024 ranks (TP 4, PP 8, EP 4, the rest data parallel): the work and the traffic of
the busiest rank of a middle stage in one step. This is the assignment that the optimizer uses; nothing is measured there.
"/ mean" is the busiest rank's total work over the mean; "in step" is the sum of each round's busiest rank over the mean: the time
if no rank ran ahead into the next round; "largest" is the largest parameter, which one rank does alone: the work cannot be
balanced better than that.
"""

import argparse
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batching import AssemblyOptions, SupervisedExample, SupervisedPlan, supervised_microbatches
from megatron_rl.config import Config
from megatron_rl.conversion import random_hf_tensors
from megatron_rl.engine import build_engine
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.objective import Denominators, SupervisedLoss
from megatron_rl.optim import DistributedMuon, HeldPiece, MuonRates, Piece, assign_rounds, bytes_sent, loads_of, stage_tasks
from megatron_rl.optim.exchange import Routing, assemble, split_updates
from megatron_rl.optim.muon import updates_of
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement

ROOT = Path(__file__).parents[1]
DEMO = tomllib.loads((ROOT / "model_configs" / "tiny-moe-cpu.toml").read_text())["model"]["architecture"]
ARMS = ("adamw", "muon", "naive_muon")
LAYOUTS = {"dp2": Layout(2), "tp2": Layout(2, tp=2)}
NEWTON_SCHULZ_STEPS = 5
ELEMENTS_PER_RANK = 128 * 2**20
UNEVEN = {"Qwen3-235B-A22B": (11, 11), "Kimi-K2": (7, 6)}
"""Layers of the first and the last of 8 stages."""


class NaiveMuon(DistributedMuon):
    """Every rank gathers and orthogonalises all parameters, and keeps its pieces."""

    def __init__(self, settings, rounds, pieces: Sequence[Piece], group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(settings, rounds, pieces, group, device)
        everyone: list[list[Piece]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everyone, list(pieces), group=group)
        parameters = tuple(task.parameter for each in rounds for task in each.tasks)
        mine = tuple(tuple(pieces) if rank == group.rank() else () for rank in range(group.size()))
        self._all = Routing((), tuple(map(tuple, everyone)), (), mine, parameters)

    @torch.no_grad()
    def step(self, held: Sequence[HeldPiece], rates: MuonRates) -> None:
        for each in held:
            each.momentum.mul_(self._settings.momentum).add_(each.gradient)
            each.gradient.add_(each.momentum, alpha=self._settings.momentum)
        lengths = [sum(piece.length for piece in pieces) for pieces in self._all.incoming]
        own = torch.zeros(max(lengths))
        torch.cat([each.gradient for each in held], out=own[: lengths[self._group.rank()]])
        received = [torch.empty_like(own) for _ in lengths]
        dist.all_gather(received, own, group=self._group)
        directions = assemble(self._all, [flat[:length] for flat, length in zip(received, lengths, strict=True)])
        update = split_updates(self._all, updates_of(self._all.owned, directions, self._settings), own)[self._group.rank()]
        for each, part in zip(held, update.split([h.weight.numel() for h in held]), strict=True):
            each.weight.mul_(1 - rates.learning_rate * rates.weight_decay).add_(part, alpha=-rates.learning_rate)


def measure(rank: int, layout: Layout, arm: str, repeats: int, architecture: dict) -> list[float]:
    """Seconds of each optimizer step after the first."""
    from megatron_rl.engine.groups import parallel_layout
    from megatron_rl.engine.optimizers import muon

    config = Config.model_validate({
        "run": {"name": "bench", "steps": 1}, "task": {"name": "chain_sum"}, "rollouts": {"max_new_tokens": 16},
        "model": {"architecture": architecture, "dtype": "float32", "max_sequence_length": 64},
        "trainer": {"max_tokens_per_microbatch": 64}, "layout": {"world_size": layout.world_size, "tensor": layout.tp},
        "optimizer": {"name": "adamw" if arm == "adamw" else "muon"},
    })  # fmt: skip
    muon.DistributedMuon = NaiveMuon if arm == "naive_muon" else DistributedMuon
    with parallel_layout(layout) as groups:
        engine = build_engine(config, groups, architecture, dict(random_hf_tensors(ParameterTable(architecture), 0)))
        contract = engine.table.architecture.contract
        options = AssemblyOptions(contract, 64, sequence_parallel=config.sequence_parallel, moe_layers=engine.moe_layers)
        random = np.random.default_rng(0)
        texts = [tuple(int(token) for token in random.integers(0, contract.vocab_size, 12)) for _ in range(8)]
        plan = SupervisedPlan(0, tuple(SupervisedExample(text[:6], text[6:]) for text in texts))
        batch = supervised_microbatches(plan, layout, groups.coords, options)
        found = [
            engine.train_step(batch, SupervisedLoss(), Denominators.of(plan), step=step, learning_rate=1e-4)["optimizer_s"].value
            for step in range(repeats + 1)
        ]
        engine.close()
    return found[1:]


def measured(turns: int, repeats: int, architecture: dict) -> dict[str, dict[str, float]]:
    """Median seconds by layout and arm; arms take turns, so that a slow minute of the machine affects all of them."""
    found: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS} for name in LAYOUTS}
    with RankPool(2) as pool:
        for _ in range(turns):
            for name, layout in LAYOUTS.items():
                for arm in ARMS:
                    found[name][arm] += pool.run(measure, layout, arm, repeats, architecture)[0]
    return {name: {arm: median(times) for arm, times in arms.items()} for name, arms in found.items()}


def pieces_of(placement: Placement, stage: int, number: int) -> list[Piece]:
    """What rank `number` of a stage holds of Muon's parameters.

    The distributed optimizer concatenates the dense and the expert parameters and cuts each evenly over their replicas.
    """
    layout = placement.layout
    coords = layout.coords_of(stage * layout.ranks_per_stage + number)
    held = [h for h in placement.held_by(coords.rank).values() if h.parameter.role.has_matrices]
    cuts = {True: (coords.edp, layout.edp), False: (coords.dp, layout.dp)}
    return [
        Piece(h.parameter.name, h.shard_rank, h.num_shards, start, stop)
        for is_expert, (part, count) in cuts.items()
        for h, start, stop in _cut([h for h in held if h.parameter.is_expert == is_expert], part, count)
    ]


def _cut(held: list, part: int, count: int) -> Iterator[tuple]:
    sizes = [h.shape[0] * h.shape[1] for h in held]
    first, last, offset = sum(sizes) * part // count, sum(sizes) * (part + 1) // count, 0
    for h, size in zip(held, sizes, strict=True):
        start, stop = max(first - offset, 0), min(last - offset, size)
        if start < stop:
            yield h, start, stop
        offset += size


def planned(name: str, config: dict, world_sizes: Sequence[int]) -> list[dict[str, float]]:
    """One row for each number of ranks."""
    first, last = UNEVEN[name]
    rows = []
    for world_size in world_sizes:
        layout = Layout(world_size, tp=4, pp=8, ep=4, first_stage_layers=first, last_stage_layers=last)
        placement = Placement(ParameterTable(config, padded_vocab_size=layout.padded_vocab_size(config["vocab_size"])), layout)
        tasks = stage_tasks(placement, 1, NEWTON_SCHULZ_STEPS)
        rounds = assign_rounds(tasks, layout.ranks_per_stage, ELEMENTS_PER_RANK)
        loads = loads_of(rounds, layout.ranks_per_stage)
        pieces = [pieces_of(placement, 1, number) for number in range(layout.ranks_per_stage)]
        mean = sum(loads) / len(loads)
        in_step = sum(max(loads_of([each], len(loads))) for each in rounds)
        rows.append({
            "ranks": world_size, "tflop_busiest": max(loads) / 1e12, "busiest_over_mean": max(loads) / mean,
            "rounds": len(rounds), "rounds_in_step_over_mean": in_step / mean,
            "largest_matrix_over_mean": max(t.flops for t in tasks) / mean,
            "tflop_naive": sum(loads) / 1e12, "gib_sent_busiest": max(bytes_sent(rounds, pieces)) / 2**30,
            "gib_momentum": max(4 * sum(piece.length for piece in held) for held in pieces) / 2**30,
        })  # fmt: skip
    return rows


def busiest_over_mean(config: dict, ranks: int) -> float:
    """With `ranks` replicas of the full model."""
    placement = Placement(ParameterTable(config), Layout(ranks))
    loads = loads_of(assign_rounds(stage_tasks(placement, 0, NEWTON_SCHULZ_STEPS), ranks, ELEMENTS_PER_RANK), ranks)
    return max(loads) * ranks / sum(loads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="to try the script: two layers, one step, few ranks")
    parser.add_argument("--repeats", type=int, default=10, help="steps of each arm in each of three turns")
    asked = parser.parse_args()
    published = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())
    architecture = DEMO | ({"num_hidden_layers": 2} if asked.quick else {})
    seconds = measured(*((1, 1) if asked.quick else (3, asked.repeats)), architecture)
    plans = {
        name: planned(name, published[name]["config"], (32,) if asked.quick else (32, 64, 128, 256, 512, 1024)) for name in UNEVEN
    }
    result = {
        "busiest_over_mean_dp4": max(
            busiest_over_mean(config, 4) for config in (DEMO, *(published[n]["config"] for n in UNEVEN))
        ),
        "step_over_adamw": max(arms["muon"] / arms["adamw"] for arms in seconds.values()),
        "step_over_naive_muon": max(arms["muon"] / arms["naive_muon"] for arms in seconds.values()),
        "seconds": seconds, "plans": plans,
    }  # fmt: skip
    show(result)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict) -> None:
    print(f"{'':6}" + "".join(f"{arm + ' ms':>16}" for arm in ARMS))
    for name, arms in result["seconds"].items():
        print(f"{name:6}" + "".join(f"{1e3 * arms[arm]:16.1f}" for arm in ARMS))
    for key in ("busiest_over_mean_dp4", "step_over_adamw", "step_over_naive_muon"):
        print(f"{key} = {result[key]:.3f}")
    for name, rows in result["plans"].items():
        print(
            f"\n{name}, a middle stage, one step\n"
            f"{'ranks':>6}{'TFLOP, busiest':>16}{'/ mean':>8}{'rounds':>8}{'in step':>9}{'largest':>9}"
            f"{'naive':>10}{'GiB sent':>10}{'GiB momentum':>14}"
        )
        for row in rows:
            print(
                f"{row['ranks']:6}{row['tflop_busiest']:16.2f}{row['busiest_over_mean']:8.3f}{row['rounds']:8}{row['rounds_in_step_over_mean']:9.2f}"
                f"{row['largest_matrix_over_mean']:9.2f}{row['tflop_naive']:10.1f}"
                f"{row['gib_sent_busiest']:10.2f}{row['gib_momentum']:14.2f}"
            )


if __name__ == "__main__":
    main()
