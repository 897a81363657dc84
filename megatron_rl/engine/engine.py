"""The trainer's engine on one rank: the model, its optimizer, and what a trainer does with them."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.config import Config
from megatron_rl.engine.batch import DeviceMicrobatch
from megatron_rl.engine.checkpoint import load_checkpoint, save_checkpoint
from megatron_rl.engine.gradients import check_gradients
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.head import Loss
from megatron_rl.engine.model import Backend, PolicyModel, build_chunks, mark_parameters, wrap_for_training
from megatron_rl.engine.mtp import transformer_layers
from megatron_rl.engine.native_fp4 import NativeQuantiser, leave_in_full_precision
from megatron_rl.engine.optimizers import build_optimizer
from megatron_rl.engine.parameters import LocalParameters, Weights
from megatron_rl.engine.passes import Passes
from megatron_rl.engine.quantisation import (
    Nvfp4WeightExport,
    PolicyQuantiser,
    ValueQuantiser,
    check_input_quantisation,
    quantise_inputs,
    quantiser_of_values,
)
from megatron_rl.engine.replay import RoutingReplay
from megatron_rl.engine.weight_export import WeightExport
from megatron_rl.metrics import Metric, merge
from megatron_rl.objective import Denominators, Measured
from megatron_rl.precision import check_shards, selection_of, wire_format
from megatron_rl.weight_mapping import HeldParameter, ParameterTable, Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Scores of one microbatch's N positions; zeros where there is no loss."""

    log_probs: np.ndarray  # f32 [N]
    entropies: np.ndarray  # f32 [N], nats, over each token's own support (its keep-set, or the vocabulary)


class Engine:
    """One rank's part of the policy and of its optimizer. Methods are collectives unless they say otherwise.

    Args:
        config: The run's configuration.
        groups: This rank's process groups, at the run's layout.
        hf_config: The model's config.json.
        weights: Hugging Face names to tensors (an HfCheckpoint). Of each tensor only this rank's part is read.

    Raises:
        UnsupportedModelError: Megatron-Core cannot train this model at this layout on this machine.
    """

    def __init__(
        self, config: Config, groups: ParallelGroups, hf_config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        self.config, self.groups = config, groups
        self.backend = Backend.of(groups.device)
        padded = groups.layout.padded_vocab_size(hf_config["vocab_size"])
        self.table = ParameterTable(
            hf_config, padded_vocab_size=padded, naming=self.backend.naming, with_mtp=config.model.mtp == "trained"
        )
        self.placement = Placement(self.table, groups.layout)
        self.chunks: list[PolicyModel] = build_chunks(
            self.table.architecture, config, groups, self.backend, padded_vocab_size=padded
        )
        mark_parameters(self.chunks, self.placement, groups.rank)
        self.parameters = LocalParameters(self.placement, groups.rank, self.chunks)
        self._quantiser = self._build_quantiser()
        self._fill(weights)
        replay = RoutingReplay(self.chunks)
        self.models = wrap_for_training(self.chunks)
        self.reset_optimizer()
        self.passes = Passes(config, self.table.architecture, groups, self.models, replay, self._quantiser)
        self._reference: Weights | None = None

    def close(self) -> None:
        """Release the model, which cannot be used afterwards. No collective.

        A layer's token dispatcher keeps the last microbatch's graph, whose ends keep Megatron's gradient hooks, and these the
        model and its process groups: a cycle that Python cannot collect.
        """
        for model in self.models:
            model.grad_accs = []
            for layer in transformer_layers(model.module):
                layer.mlp.token_dispatcher = None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """This rank's MoE layers, numbered among the model's MoE layers: what a microbatch's `routed_experts` must hold."""
        return self.passes.moe_layers

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches is a multiple of this (interleaved stages require it)."""
        return self.passes.microbatch_multiple

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        loss: Loss,
        denominators: Denominators,
        *,
        step: int,
        learning_rate: float,
        old_logprobs: Sequence[np.ndarray] | None = None,
        reference_logprobs: Sequence[np.ndarray] | None = None,
    ) -> dict[str, Metric]:
        """Make one optimizer update.

        Args:
            microbatches: Microbatches of this data-parallel rank, N positions each; as many as every other rank's.
            loss: The step's loss, see head.Loss.
            denominators: What the shares of the loss are divided by.
            step: Number of the step, for error messages.
            learning_rate: Learning rate of this step.
            old_logprobs: f32 [N] of each microbatch, from `score` under the old policy.
            reference_logprobs: f32 [N] of each microbatch, from `score_reference`.

        Returns:
            The loss's metrics over the step and the step's own, the same on every rank.

        Raises:
            NonFiniteGradientError: The gradients hold NaN or infinity; the weights are unchanged.
            ScheduleError: The layout cannot run these microbatches.
            RouteError: Routes that a router cannot follow.
        """
        began = time.perf_counter()
        timer = self.passes.timer
        with timer:
            prepared = self.passes.prepare(microbatches, old_logprobs, reference_logprobs)
        self.optimizer.begin_step()
        measured = self.compute_gradients(prepared, loss, denominators)
        check_gradients(self.models, self.parameters.names(), step)
        reduced = time.perf_counter()
        before_update_s = timer.read()
        grad_norm = self.optimizer.step(learning_rate)
        self._quantiser.weights_changed()
        done = time.perf_counter()
        with timer:
            metrics = merge(part.metrics() for part in measured)
        timings = {
            "forward_backward_s": Metric("max", reduced - began - before_update_s),
            "optimizer_s": Metric("max", done - reduced),
            "own_s": Metric("max", before_update_s + timer.read()),
        }
        rates = {"grad_norm": Metric("last", grad_norm), "learning_rate": Metric("last", learning_rate)}
        return {**self._over_ranks(metrics, timings | self.optimizer.metrics()), **rates}

    def compute_gradients(
        self, prepared: Sequence[DeviceMicrobatch], loss: Loss, denominators: Denominators, *, reduce_fully: bool = False
    ) -> list[Measured]:
        """Gradients of a step's loss in the models' buffers, in place of what is there; see Passes.forward_backward."""
        self.optimizer.zero_grad()
        return self.passes.forward_backward(prepared, loss, denominators, reduce_fully=reduce_fully)

    def score(self, microbatches: Sequence[Microbatch]) -> list[Scores]:
        """Log-probabilities and entropies under the current weights.

        Args:
            microbatches: Microbatches of this data-parallel rank; as many as every other rank's.

        Returns:
            One of each microbatch, on every rank of the pipeline.
        """
        kept = self.passes.log_probs(self.passes.prepare(microbatches))
        flat = torch.zeros(2, sum(m.num_positions for m in microbatches), device=self.groups.device)
        if self.groups.is_last_stage:
            torch.cat([torch.stack(pair) for pair in kept], dim=1, out=flat)
        last = dist.get_process_group_ranks(self.groups.pp)[-1]
        dist.broadcast(flat, src=last, group=self.groups.pp)
        parts = flat.cpu().split([m.num_positions for m in microbatches], dim=1)
        return [Scores(log_probs=part[0].numpy(), entropies=part[1].numpy()) for part in parts]

    def keep_reference(self) -> None:
        """Keep the current weights as the reference policy, on the host. No collective."""
        self._reference = self.parameters.snapshot()

    def score_reference(self, microbatches: Sequence[Microbatch]) -> list[Scores]:
        """Same as `score`, under the weights of `keep_reference`."""
        assert self._reference is not None, (
            "there is no reference policy: call keep_reference while the weights are the reference's"
        )
        with self.using_weights(self._reference):
            return self.score(microbatches)

    @contextmanager
    def using_weights(self, weights: Weights) -> Iterator[None]:
        """Passes inside the block use other weights; afterwards the policy's are back to the last bit. No collective.

        Args:
            weights: From `parameters.snapshot` of an engine of the same layout. They hold the policy's weights meanwhile.
        """
        self._swap(weights)
        try:
            yield
        finally:
            self._swap(weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's weights; the optimizer starts anew from them.

        Args:
            weights: Hugging Face names to tensors.
        """
        self._fill(weights)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget moments and step count, as between a supervised start and the first RL step."""
        self.optimizer = build_optimizer(self.config, self.models, self.parameters, self.groups)

    def save(self, folder: Path, step: int) -> None:
        """Write model and optimizer into a new folder, which appears when it is complete.

        Args:
            folder: Must not exist; its parent is made.
            step: Returned by `load`.

        Raises:
            EngineCheckpointError: The folder exists, or cannot be written.
        """
        save_checkpoint(folder, self.models, self.optimizer, self.table.architecture, self.config.model.dtype, step)

    def load(self, folder: Path) -> int:
        """Read model and optimizer from a folder that `save` wrote, at this or any other layout.

        Returns:
            The step that it was saved with.

        Raises:
            EngineCheckpointError: The folder is incomplete, damaged, or of another model or optimizer.
        """
        self._quantiser.weights_changed()
        return load_checkpoint(folder, self.models, self.optimizer, self.table.architecture, self.config.model.dtype)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of all that a step changes, by name and in the order of the model; no collective.

        Returns:
            Each weight, followed by what its optimizer holds of it: "NAME", "NAME exp_avg", "NAME exp_avg_sq", "NAME step" and,
            where the model is not fp32, "NAME master". Views of the state itself.
        """
        for held, parameter in self.parameters:
            yield held.parameter.name, parameter.detach()
            for kind, tensor in self.optimizer.state_of(parameter).items():
                yield f"{held.parameter.name} {kind}", tensor.detach()

    def export(self, dtype: torch.dtype, shard_of: Callable[[HeldParameter], Tensor]) -> WeightExport:
        """Tensors under Hugging Face names, gathered to rank 0 as they are iterated.

        Args:
            dtype: Dtype of tensors for which the table names none.
            shard_of: This rank's part of a parameter, or of something of its shape.
        """
        return WeightExport(self.placement, self.groups.rank, self.groups.device, dtype, shard_of)

    def hf_tensors(self) -> WeightExport:
        """The policy under Hugging Face names, gathered to rank 0 as it is iterated, in the model's dtype."""
        return self.export(getattr(torch, self.config.model.dtype), self.parameters.tensor)

    def rollout_tensors(self) -> WeightExport | Nvfp4WeightExport:
        """The policy as the rollout servers take it.

        As `hf_tensors`, but without the layers for multi-token prediction, which the servers do not run; with NVFP4 rollouts the
        quantised matrices are packed.
        """
        tensors = self.hf_tensors().without(self.table.mtp_names)
        if self.config.precision.rollouts == "full":
            return tensors
        stored_as = wire_format(self.config.precision, own_layers=self.config.servers_have_nvfp4_layers)
        return Nvfp4WeightExport(tensors, self._quantiser, stored_as)

    def _build_quantiser(self) -> PolicyQuantiser:
        """Prepares the modules for [precision].

        Raises:
            QuantisationError: The layout cuts a matrix where it cannot be quantised.
            UnsupportedModelError: This machine cannot compute so.
        """
        section, device = self.config.precision, self.groups.device
        selection = selection_of(section, self.table)
        check_shards(section, (held for held in self.parameters.held if held.parameter.name in selection.names))
        modules = self.parameters.modules(self.chunks, selection.names)
        if section.training == "native":
            left = leave_in_full_precision((m for chunk in self.chunks for m in chunk.modules()), modules)
            if self.groups.rank == 0:
                logger.info("native fp4: %d linear layers of this rank, %d in full precision", len(modules), left)
            return NativeQuantiser(selection, self.parameters, device)
        if section.activations == "nvfp4":
            check_input_quantisation(has_transformer_engine=self.backend.transformer_engine)
            quantise_inputs(modules, section.activation_amax, device)
        if section.training == "qat":
            kernel = quantiser_of_values(device, has_transformer_engine=self.backend.transformer_engine)
            return ValueQuantiser(selection, self.parameters, device, kernel)
        return PolicyQuantiser(selection, self.parameters, device)

    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        self._quantiser.weights_changed()
        self.parameters.fill(weights)

    def _swap(self, weights: Weights) -> None:
        self._quantiser.weights_changed()
        self.parameters.swap(weights)

    def _over_ranks(self, metrics: dict[str, Metric], timings: dict[str, Metric]) -> dict[str, Metric]:
        """Merge metrics over ranks. Of the ranks that hold the same tokens' values, one reports for all."""
        coords = self.groups.coords
        is_reporting_rank = self.groups.is_last_stage and coords.tp == 0 and coords.cp == 0
        everywhere: list[dict[str, Metric]] = [{} for _ in range(self.groups.layout.world_size)]
        dist.all_gather_object(everywhere, {**timings, **(metrics if is_reporting_rank else {})})
        return merge(everywhere)
