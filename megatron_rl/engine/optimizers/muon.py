"""Muon inside Megatron's distributed optimizer, which keeps the fp32 masters, the gradient norm, clipping and all communication.

Each data-parallel rank holds a slice of every parameter, its gradient and its states. Before AdamW steps, Muon updates its own
slices and takes their gradients away, so that AdamW passes over them. A parameter of Muon's has the state "exp_avg", its
momentum, and no second moment.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.config import Config, sections
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.optimizers.adamw import AdamW
from megatron_rl.engine.optimizers.megatron_state import make_states, parts_of, slice_of, torch_optimizers
from megatron_rl.engine.optimizers.qk_clip import QkClip
from megatron_rl.engine.parameters import LocalParameters
from megatron_rl.metrics import Metric
from megatron_rl.optim import DistributedMuon, HeldPiece, MuonRates, MuonSettings, Piece, assign_rounds, stage_tasks
from megatron_rl.weight_mapping import GroupedQueryAttention, HeldParameter, ModelArchitecture


class Muon(AdamW):
    """Muon for the weight matrices of attention, MLPs and experts, with QK-clip if asked for; AdamW for the rest."""

    name = "muon"

    def __init__(
        self, config: Config, models: Sequence[DistributedDataParallel], parameters: LocalParameters, groups: ParallelGroups
    ) -> None:
        super().__init__(config, models, parameters, groups)
        for optimizer in torch_optimizers(self.megatron):
            if not isinstance(optimizer, torch.optim.AdamW):  # a fused one is loaded without states, but not with some of them
                make_states(optimizer)
        trained = parameters.trained()
        self._rates = MuonRates(0.0, 0.0)
        self._slices: list[tuple[Any, Tensor]] = []  # (part of Megatron's optimizer, its slice of a parameter)
        own = [(held, tensor) for held, tensor in trained if held.parameter.role.has_matrices]
        self._muon = self._distributed(self._section.muon, parameters, own, groups)
        parts = parts_of(self.megatron)
        for part in parts:
            _save_without_second_moments(part, {tensor for _, tensor in own})
        # Megatron prepares and clips the gradients of all its parts before the first of them steps.
        parts[0].optimizer.register_step_pre_hook(lambda *_: self._step_matrices())
        threshold, self._qk_clip = self._section.muon.qk_clip, None
        if threshold is not None:
            architecture, chunks = parameters.placement.table.architecture, [model.module for model in models]
            self._qk_clip = QkClip(threshold, self.megatron, architecture, groups, chunks, trained)

    @classmethod
    def check_model(cls, model: ModelArchitecture, config: Config) -> None:
        """QK-clip needs an attention without norms of q and k."""
        threshold = config.optimizer.muon.qk_clip
        if threshold is not None and isinstance(model.attention, GroupedQueryAttention) and model.attention.qk_norm:
            raise UnsupportedModelError(
                f"optimizer.muon.qk_clip = {threshold}: this {model.model_type} normalises q and k after their projections, "
                "so that scaling these changes no logit, and the norms' weights bound the logits; leave qk_clip out"
            )

    @classmethod
    def model_settings(cls, config: Config) -> dict[str, Any]:
        """QK-clip needs the largest attention logits."""
        return {"qk_clip": config.optimizer.muon.qk_clip is not None}  # core attention measures; what follows from it is ours

    def begin_step(self) -> None:
        """See PolicyOptimizer."""
        if self._qk_clip:
            self._qk_clip.forget()

    def step(self, learning_rate: float) -> float:
        """See PolicyOptimizer."""
        self._rates = muon_rates(self._section, learning_rate)
        return super().step(learning_rate)

    def metrics(self) -> dict[str, Metric]:
        """The largest attention logit of the step, with QK-clip."""
        return {"max_attention_logit": Metric("max", self._qk_clip.largest_logit)} if self._qk_clip else {}

    def _distributed(
        self,
        section: sections.Muon,
        parameters: LocalParameters,
        own: Sequence[tuple[HeldParameter, Tensor]],
        groups: ParallelGroups,
    ) -> DistributedMuon:
        """Take the slices over from AdamW."""
        settings = MuonSettings(section.momentum, section.newton_schulz_steps, getattr(torch, section.newton_schulz_dtype))
        pieces = []
        for held, parameter in own:
            for part in parts_of(self.megatron):
                if (found := slice_of(part, parameter)) is not None:
                    updated, start, stop = found
                    pieces.append(Piece(held.parameter.name, held.shard_rank, held.num_shards, start, stop))
                    self._slices.append((part, updated))
                    part.optimizer.state[updated].pop("exp_avg_sq")
                    if not updated.is_leaf:  # a view of an fp32 parameter: PyTorch warns whoever looks for a gradient there
                        updated.retain_grad()
        placement = parameters.placement
        tasks = stage_tasks(placement, groups.coords.pp, settings.newton_schulz_steps)
        rounds = assign_rounds(tasks, placement.layout.ranks_per_stage, section.round_mib * 2**20 // 4)  # fp32
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return DistributedMuon(settings, rounds, pieces, stage, groups.device)

    def _step_matrices(self) -> None:
        self._muon.step([self._held_piece(part, updated) for part, updated in self._slices], self._rates)
        for part, updated in self._slices:
            updated.grad = None
            if "step" in (state := part.optimizer.state[updated]):  # PyTorch's AdamW: Megatron wants one count for all
                state["step"] += 1

    @staticmethod
    def _held_piece(part: Any, updated: Tensor) -> HeldPiece:
        assert updated.grad is not None
        return HeldPiece(updated, part.optimizer.state[updated]["exp_avg"], updated.grad)


def muon_rates(section: sections.Optimizer, learning_rate: float) -> MuonRates:
    """Muon's rates of a step: its learning rate follows AdamW's schedule.

    Args:
        section: The run's optimizer section.
        learning_rate: AdamW's in this step.
    """
    own, decay = section.muon.learning_rate, section.muon.weight_decay
    return MuonRates(
        learning_rate=learning_rate if own is None else learning_rate * own / section.learning_rate,
        weight_decay=section.weight_decay if decay is None else decay,
    )


def _save_without_second_moments(part: Any, own: set[Tensor]) -> None:
    """Let Megatron save a part in which Muon's parameters have no second moment.

    Its checkpoints want one of every parameter: these get zeros in passing, which are not written.
    """
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
