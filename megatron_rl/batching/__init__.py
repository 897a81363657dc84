"""From rollouts to what a trainer rank consumes: advantages, the choice of a step, packing, the spool."""

from megatron_rl.batching.advantages import ADVANTAGES, group_mean, group_mean_std
from megatron_rl.batching.assemble import microbatches_for, supervised_microbatches
from megatron_rl.batching.microbatch import Microbatch
from megatron_rl.batching.options import AssemblyOptions
from megatron_rl.batching.packing import Alignment, PackingError, alignment_of, pack
from megatron_rl.batching.positions import SequenceSlice, routed_positions
from megatron_rl.batching.routes import cut_routes
from megatron_rl.batching.spool import PlanKind, Spool, SpoolError
from megatron_rl.batching.step import build_probe, build_step, split_step, summarise
from megatron_rl.batching.supervised import SupervisedExample, SupervisedPlan

__all__ = [
    "ADVANTAGES",
    "Alignment",
    "AssemblyOptions",
    "Microbatch",
    "PackingError",
    "PlanKind",
    "SequenceSlice",
    "Spool",
    "SpoolError",
    "SupervisedExample",
    "SupervisedPlan",
    "alignment_of",
    "build_probe",
    "build_step",
    "cut_routes",
    "group_mean",
    "group_mean_std",
    "microbatches_for",
    "pack",
    "routed_positions",
    "split_step",
    "summarise",
    "supervised_microbatches",
]
