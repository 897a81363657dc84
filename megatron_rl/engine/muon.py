"""Muon inside of Megatron's distributed optimizer, which keeps the fp32 masters, the gradient norm, clipping and all communication.

Each data-parallel rank holds a slice of every parameter, its gradient and its states. Before AdamW steps, Muon updates its own slices
and takes their gradients away, so that AdamW passes over them. A parameter of Muon's has the state "exp_avg", its momentum, and no
second moment.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.optim import DistributedMuon, HeldPiece, MuonRates, MuonSettings, Piece, plan_rounds, stage_tasks
from megatron_rl.weight_mapping import HeldParameter, Placement


class Muon:
    """Takes its parameters over from `optimizer`; `rates` are set before each step.

    parameters: the tensors that Megatron trains on this rank, each with what the table says of it.
    """

    def __init__(
        self, config: Config, optimizer: MegatronOptimizer, placement: Placement, groups: ParallelGroups,
        parameters: Iterable[tuple[HeldParameter, Tensor]],
    ) -> None:  # fmt: skip
        section = config.optimizer.muon
        settings = MuonSettings(section.momentum, section.newton_schulz_steps, getattr(torch, section.newton_schulz_dtype))
        self.rates = MuonRates(0.0, 0.0)
        self._slices: list[tuple[Any, Tensor]] = []  # (part of the optimizer, its slice of a parameter)
        pieces = []
        own = [(held, tensor) for held, tensor in parameters if held.parameter.role.has_matrices]
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        for held, parameter in own:
            for part in parts:
                if (found := slice_of(part, parameter)) is not None:
                    updated, start, stop = found
                    pieces.append(Piece(held.parameter.name, held.shard_rank, held.num_shards, start, stop))
                    self._slices.append((part, updated))
                    part.optimizer.state[updated].pop("exp_avg_sq")
                    if not updated.is_leaf:  # a view of an fp32 parameter: PyTorch warns of whoever looks for a gradient there
                        updated.retain_grad()
        tasks = stage_tasks(placement, groups.coords.pp, settings.newton_schulz_steps)
        rounds = plan_rounds(tasks, placement.layout.ranks_per_stage, section.round_mib * 2**20 // 4)  # fp32
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        self._muon = DistributedMuon(settings, rounds, pieces, stage, groups.device)
        for part in parts:
            _save_without_second_moments(part, {tensor for _, tensor in own})
        # Megatron prepares and clips the gradients of all its parts before the first of them steps.
        parts[0].optimizer.register_step_pre_hook(lambda *_: self._step())

    def _step(self) -> None:
        held = [HeldPiece(updated, part.optimizer.state[updated]["exp_avg"], updated.grad) for part, updated in self._slices]
        self._muon.step(held, self.rates)
        for part, updated in self._slices:
            updated.grad = None
            if "step" in (state := part.optimizer.state[updated]):  # PyTorch's AdamW: Megatron wants one count for all
                state["step"] += 1


def slice_of(part: Any, parameter: Tensor) -> tuple[Tensor, int, int] | None:
    """Of the slice of a parameter that this data-parallel rank updates in this part of the optimizer: the flat fp32 tensor, and where
    it begins and ends in the flattened parameter. None where there is none."""
    place = getattr(part, "model_param_group_index_map", {}).get(parameter)
    if place is None:
        return None
    group, number = place
    span = part._get_model_param_range_map(parameter)["param"]
    return part.optimizer.param_groups[group]["params"][number], span.start, span.end


def _save_without_second_moments(part: Any, own: set[Tensor]) -> None:
    """Megatron's checkpoints want a second moment of every parameter: they get zeros in passing, which are not written."""
    if not hasattr(part, "model_param_group_index_map"):
        return
    states_of, sharded = part._get_main_param_and_optimizer_states, part.sharded_param_state_fully_reshardable

    @functools.wraps(states_of)
    def with_zeros(parameter: Tensor) -> dict[str, Tensor]:
        states = states_of(parameter)
        return {"exp_avg_sq": states["exp_avg"].new_zeros(()).expand_as(states["exp_avg"]), **states}

    @functools.wraps(sharded)
    def without_zeros(*args: Any, **kwargs: Any) -> dict[int, dict[str, Any]]:
        found = sharded(*args, **kwargs)
        saved = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
        return {
            number: {key: value for key, value in states.items() if key != "exp_avg_sq" or saved[number] not in own}
            for number, states in found.items()
        }

    part._get_main_param_and_optimizer_states = with_zeros
    part.sharded_param_state_fully_reshardable = without_zeros
