"""The layout planner: predicts memory and time of a layout, and searches for the best one, without a cluster.

    counts = ParameterCounts(hf_config)
    plans = balance(counts, workload_of(config), machine_named("h200"), gpus=256, node=8).plans

What a rank holds is exact; activations are counted operation by operation; times come from rooflines, whose efficiencies are in
machines.toml together with the runs that they were fitted to.
"""

from megatron_rl.planner.balance import Balanced, ParallelismPlan, balance
from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.machine import Machine, MachineError, known_machines, machine_named
from megatron_rl.planner.workload import Candidate, Workload, candidate_of, workload_of

__all__ = [
    "Balanced",
    "Candidate",
    "Machine",
    "MachineError",
    "ParallelismPlan",
    "ParameterCounts",
    "Workload",
    "balance",
    "candidate_of",
    "known_machines",
    "machine_named",
    "workload_of",
]  # fmt: skip
