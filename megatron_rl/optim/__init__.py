"""Muon for the logical matrices of a model that is sharded over many ranks; its update does not depend on the layout.

tasks = stage_tasks(placement, stage, newton_schulz_steps)
rounds = assign_rounds(tasks, layout.ranks_per_stage, elements_per_rank)      # the Muon assignment: who orthogonalises what
muon = DistributedMuon(settings, rounds, pieces, stage_group, device)
muon.step(held, MuonRates(learning_rate, weight_decay))                       # weights and momenta in place
"""

from megatron_rl.optim.assignment import AssignedRound, MuonTask, assign_rounds, loads_of, stage_tasks
from megatron_rl.optim.exchange import Piece, bytes_sent
from megatron_rl.optim.muon import DistributedMuon, HeldPiece
from megatron_rl.optim.newton_schulz import orthogonalise
from megatron_rl.optim.reference import MuonRates, MuonSettings, reference_step

__all__ = [
    "AssignedRound",
    "DistributedMuon",
    "HeldPiece",
    "MuonRates",
    "MuonSettings",
    "MuonTask",
    "Piece",
    "assign_rounds",
    "bytes_sent",
    "loads_of",
    "orthogonalise",
    "reference_step",
    "stage_tasks",
]
