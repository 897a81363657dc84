"""Muon for the logical matrices of a model that is laid out over many ranks; its update does not depend on the layout.

rounds = assign_rounds(stage_tasks(placement, stage, steps), layout.ranks_per_stage, elements_per_round)
muon = DistributedMuon(settings, rounds, held_pieces, group_of_the_stage)
muon.step(gradients, MuonRates(learning_rate, weight_decay))     # weights and momenta in place
"""

from megatron_rl.optim.assignment import Round, Task, assign_rounds, loads_of, stage_tasks
from megatron_rl.optim.exchange import Piece, bytes_sent
from megatron_rl.optim.muon import DistributedMuon, HeldPiece
from megatron_rl.optim.newton_schulz import orthogonalise
from megatron_rl.optim.reference import MuonRates, MuonSettings, reference_step

__all__ = [
    "DistributedMuon",
    "HeldPiece",
    "MuonRates",
    "MuonSettings",
    "Piece",
    "Round",
    "Task",
    "bytes_sent",
    "loads_of",
    "orthogonalise",
    "assign_rounds",
    "reference_step",
    "stage_tasks",
]
