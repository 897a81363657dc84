"""The trainer's engine on one rank: the model, its optimizer, and what a trainer does with them. Every method is a collective."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batching import Microbatch, SequenceSlice, routed_positions
from megatron_rl.config import Config
from megatron_rl.engine.batch import DeviceMicrobatch, to_device
from megatron_rl.engine.checkpoint import load_checkpoint, save_checkpoint
from megatron_rl.engine.dropout import dropping_out
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.head import Head, Loss
from megatron_rl.engine.model import Backend, PolicyModel, build_chunks, mark_parameters, tensor_of, wrap_for_training
from megatron_rl.engine.mtp import transformer_layers
from megatron_rl.engine.muon import Muon
from megatron_rl.engine.optimizer import build_optimizer, check_gradients, muon_rates, set_rates
from megatron_rl.engine.qk_clip import QkClip
from megatron_rl.engine.quantisation import Nvfp4Tensors, PolicyQuantiser, quantise_inputs
from megatron_rl.engine.replay import Routes, RoutingReplay, make_routes
from megatron_rl.engine.schedule import Schedule
from megatron_rl.engine.state import state_tensors
from megatron_rl.engine.timers import Clock
from megatron_rl.engine.weight_export import HfTensors
from megatron_rl.metrics import Metric, merge
from megatron_rl.objective import Denominators, Measured
from megatron_rl.precision import selection_of, wire_format
from megatron_rl.weight_mapping import HeldParameter, ParameterTable, Placement

Weights = dict[tuple[int, str], Tensor]
"""One rank's weights on the host, by chunk and Megatron's name; only an Engine of the same layout can make use of them."""


@dataclass(frozen=True)
class Scores:
    """Of one microbatch's N positions; zeros where there is no loss."""

    log_probs: np.ndarray  # f32 [N]
    entropies: np.ndarray  # f32 [N], nats, over each token's own support (its keep-set, or the vocabulary)


class Engine:
    """One rank's share of the policy and of its optimizer.

    weights: Hugging Face names to tensors (an HfCheckpoint): of each tensor only this rank's part is read.
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
        chunks = build_chunks(self.table.architecture, config, groups, self.backend, padded_vocab_size=padded)
        mark_parameters(chunks, self.placement, groups.rank)
        self._held = list(self.placement.held_by(groups.rank).values())
        self._parameters = {(held.chunk, held.name): tensor_of(chunks[held.chunk], held.name) for held in self._held}
        self._quantiser = PolicyQuantiser(
            selection_of(config.precision, self.table), ((held, self._parameter(held)) for held in self._held), groups.device
        )
        if config.precision.activations == "nvfp4":
            self._quantise_inputs(chunks)
        self._fill(weights)
        self._replay = RoutingReplay(chunks)
        self._models = wrap_for_training(chunks)
        self.reset_optimizer()
        self._schedule = Schedule(self._models, self._replay, groups)
        self._last_chunk = chunks[-1]
        self._head = Head(
            self.table.architecture.vocab_size,
            groups.tp,
            groups.cp,
            config.sequence_parallel,
            config.metrics.entropy_full_tokens,
            chunks[-1].num_outputs,
        )
        self._clock = Clock(groups.device)
        self._reference: Weights | None = None

    def close(self) -> None:
        """Let go of the model, which is of no use afterwards. A layer's token dispatcher keeps the last microbatch's graph, whose
        ends keep Megatron's gradient hooks, and these the model and its process groups: a cycle that Python cannot collect."""
        for model in self._models:
            model.grad_accs = []
            for layer in transformer_layers(model.module):
                layer.mlp.token_dispatcher = None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """This rank's MoE layers by their number among the model's, in the order of its routers: what `routed_experts` has to
        hold."""
        moe, layout = self.table.architecture.moe_layers, self.groups.layout
        own = layout.layers_of_stage(self.table.architecture.num_layers, self.groups.coords.pp)
        return tuple(moe.index(layer) for layer in own if layer in moe)

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches is a multiple of this (interleaved stages ask for it)."""
        return self._schedule.microbatch_multiple

    def train_step(
        self, microbatches: Sequence[Microbatch], loss: Loss, denominators: Denominators, *, step: int, learning_rate: float,
        old_logprobs: Sequence[np.ndarray] | None = None, reference_logprobs: Sequence[np.ndarray] | None = None,
    ) -> dict[str, Metric]:  # fmt: skip
        """One optimizer update; returns the loss's metrics over the whole step and the step's own, the same on every rank.

        microbatches: this data-parallel rank's, as many as every other's. old_logprobs, reference_logprobs: of each
        microbatch, from `score`. step: named in errors. Raises NonFiniteGradientError before the weights change.
        """
        began = time.perf_counter()
        with self._clock:
            prepared = self._prepare(microbatches, old_logprobs, reference_logprobs)
        if self._qk_clip:
            self._qk_clip.forget()
        measured = self._forward_backward(prepared, loss, denominators)
        check_gradients(self._models, self._names_of_parameters(), step)
        reduced = time.perf_counter()
        before_update_s = self._clock.read()
        self._set_rates(learning_rate)
        _, grad_norm, _ = self._optimizer.step()
        self._quantiser.weights_changed()
        done = time.perf_counter()
        with self._clock:
            metrics = merge(part.metrics() for part in measured)
        timings = {
            "forward_backward_s": Metric("max", reduced - began - before_update_s), "optimizer_s": Metric("max", done - reduced),
            "own_s": Metric("max", before_update_s + self._clock.read()),
        }  # fmt: skip
        if self._qk_clip:
            timings["max_attention_logit"] = Metric("max", self._qk_clip.largest_logit)
        rates = {"grad_norm": Metric("last", float(grad_norm)), "learning_rate": Metric("last", learning_rate)}
        return {**self._over_ranks(metrics, timings), **rates}

    def score(self, microbatches: Sequence[Microbatch]) -> list[Scores]:
        """Log-probabilities and entropies under the current weights, for this rank's microbatches, on every rank of its
        pipeline."""
        prepared = self._prepare(microbatches, None, None)
        with self._policy_weights():
            kept = self._schedule.run(prepared, self._scored, forward_only=True)
        flat = torch.zeros(2, sum(m.num_positions for m in microbatches), device=self.groups.device)
        if self.groups.is_last_stage:
            torch.cat([torch.stack(pair) for pair in kept], dim=1, out=flat)
        last = dist.get_process_group_ranks(self.groups.pp)[-1]
        dist.broadcast(flat, src=last, group=self.groups.pp)
        parts = flat.cpu().split([m.num_positions for m in microbatches], dim=1)
        return [Scores(log_probs=part[0].numpy(), entropies=part[1].numpy()) for part in parts]

    def snapshot(self, change: Callable[[HeldParameter, Tensor], Tensor] | None = None) -> Weights:
        """A copy of the current weights on the host. change: makes each tensor of the copy from the current one."""

        def copied(held: HeldParameter) -> Tensor:
            found = self._parameter(held)
            return (change(held, found) if change else found).detach().cpu().clone()

        return {(held.chunk, held.name): copied(held) for held in self._held}

    @contextmanager
    def holding(self, weights: Weights) -> Iterator[None]:
        """Passes inside see these weights; the policy's are back to the last bit afterwards."""
        self._exchange(weights)
        try:
            yield
        finally:
            self._exchange(weights)

    def dropping_out(self, probability: float) -> AbstractContextManager[None]:
        """Passes inside drop hidden states out, as no training step does."""
        return dropping_out([model.module for model in self._models], probability, self.groups.device)

    def keep_reference(self) -> None:
        """Keep the current weights as the reference policy, on the host."""
        self._reference = self.snapshot()

    def score_reference(self, microbatches: Sequence[Microbatch]) -> list[Scores]:
        """As `score`, under the weights of `keep_reference`."""
        if self._reference is None:
            raise ValueError("there is no reference policy: call keep_reference while the weights are the reference's")
        with self.holding(self._reference):
            return self.score(microbatches)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's weights; the optimizer begins anew from them."""
        self._fill(weights)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget moments and step count, as between a supervised start and the first RL step."""
        self._optimizer = build_optimizer(self.config, self._models)
        self._muon: Muon | None = None
        self._qk_clip: QkClip | None = None
        if self.config.optimizer.name == "muon":
            held = [(held, self._parameter(held)) for held in self._held if not held.is_tied_copy]
            self._muon = Muon(self.config, self._optimizer, self.placement, self.groups, held)
            if (threshold := self.config.qk_clip) is not None:
                chunks = [model.module for model in self._models]
                self._qk_clip = QkClip(threshold, self._optimizer, self.table.architecture, self.groups, chunks, held)

    def save(self, folder: Path, step: int) -> None:
        """Model and optimizer into a new folder, which appears when it is whole; `step` is given back by `load`."""
        save_checkpoint(folder, self._models, self._optimizer, self.table.architecture, self.config, step)

    def load(self, folder: Path) -> int:
        """Model and optimizer from a folder that `save` wrote, at this or any other layout; returns its step."""
        self._quantiser.weights_changed()
        return load_checkpoint(folder, self._models, self._optimizer, self.table.architecture, self.config)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of all that a step changes, weights and optimizer, by name and in the order of the model; no
        collective."""
        return state_tensors(((held.parameter.name, self._parameter(held)) for held in self._held), self._optimizer)

    def hf_tensors(self) -> HfTensors:
        """The policy under Hugging Face names, gathered to rank 0 as it is iterated, in the model's dtype."""
        return HfTensors(
            self.placement, self.groups.rank, self.groups.device, getattr(torch, self.config.model.dtype), self._parameter
        )

    def rollout_tensors(self) -> HfTensors | Nvfp4Tensors:
        """The policy as the rollout servers take it: as `hf_tensors` without layers for multi-token prediction, which the servers do not
        run; or with NVFP4 weights packed."""
        tensors = self.hf_tensors().without(self.table.mtp_names)
        if self.config.precision.rollouts == "full":
            return tensors
        stored_as = wire_format(self.config.precision, own_layers=self.config.servers_have_nvfp4_layers)
        return Nvfp4Tensors(tensors, self._quantiser, stored_as)

    def full_gradients(self, microbatches: Sequence[Microbatch], loss: Loss, denominators: Denominators) -> HfTensors:
        """Gradients of the step's loss, fp32, under Hugging Face names, gathered to rank 0 as they are iterated. No update is
        made.

        They are overwritten by the next step. For tests and checks: the whole gradient lies on every data-parallel rank.
        """
        self._forward_backward(self._prepare(microbatches, None, None), loss, denominators, reduce_fully=True)
        self._clock.read()
        return HfTensors(self.placement, self.groups.rank, self.groups.device, torch.float32, self._gradient)

    def own_gradients(self) -> Iterator[tuple[HeldParameter, Tensor]]:
        """This rank's part of what `full_gradients` computed, until the next step; no collective."""
        yield from ((held, self._gradient(held)) for held in self._held)

    def _set_rates(self, learning_rate: float) -> None:
        section = self.config.optimizer
        set_rates(self._optimizer, learning_rate, section.weight_decay)
        if self._muon:
            self._muon.rates = muon_rates(section, learning_rate)

    def _policy_weights(self) -> AbstractContextManager[None]:
        """For passes: what the policy multiplies with."""
        return self._quantiser.applied() if self.config.precision.training == "qat" else nullcontext()

    def _quantise_inputs(self, chunks: Sequence[PolicyModel]) -> None:
        if self.backend.transformer_engine:
            raise UnsupportedModelError(
                "precision.activations = 'nvfp4': Transformer Engine's linear maps begin with a fused norm, before which nothing can be "
                "quantised; train with precision.training = 'native', or leave activations whole"
            )
        names = self._quantiser.selection.names
        modules = [
            chunks[held.chunk].get_submodule(held.name.rpartition(".")[0]) for held in self._held if held.parameter.name in names
        ]
        quantise_inputs(modules, self.config.precision.activation_amax, self.groups.device)

    def _parameter(self, held: HeldParameter) -> Tensor:
        return self._parameters[held.chunk, held.name]

    def _gradient(self, held: HeldParameter) -> Tensor:
        found = self._parameter(held)
        return found.main_grad if isinstance(found, torch.nn.Parameter) else torch.zeros_like(found, dtype=torch.float32)

    @torch.no_grad()
    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        self._quantiser.weights_changed()
        for held in self._held:
            self._parameter(held).copy_(held.shard_from_hf(weights))

    def _prepare(
        self, microbatches: Sequence[Microbatch], old: Sequence[np.ndarray] | None, reference: Sequence[np.ndarray] | None
    ) -> list[DeviceMicrobatch]:
        nothing = [None] * len(microbatches)
        return [
            self._to_device(microbatch, of_old, of_reference)
            for microbatch, of_old, of_reference in zip(microbatches, old or nothing, reference or nothing, strict=True)
        ]

    def _to_device(self, microbatch: Microbatch, old: np.ndarray | None, reference: np.ndarray | None) -> DeviceMicrobatch:
        slices = SequenceSlice.of(microbatch.segment_ends, self.groups.layout.cp, self.groups.coords.cp)
        routes = self._routes(microbatch)
        return to_device(microbatch, slices, self.groups.device, routes, old_logprobs=old, reference_logprobs=reference)

    def _routes(self, microbatch: Microbatch) -> Routes | None:
        moe = self.table.architecture.moe
        if microbatch.routed_experts is None or moe is None:
            return None
        own = routed_positions(
            microbatch.segment_ends, self.groups.layout, self.groups.coords, sequence_parallel=self.config.sequence_parallel
        )
        return make_routes(
            microbatch.routed_experts, microbatch.route_mask, microbatch.route_positions, own=own, num_layers=len(self.moe_layers),
            num_experts=moe.num_experts, top_k=moe.top_k, device=self.groups.device,
        )  # fmt: skip

    def _forward_backward(
        self, prepared: Sequence[DeviceMicrobatch], loss: Loss, denominators: Denominators, *, reduce_fully: bool = False
    ) -> list[Measured]:
        """Gradients of the step's loss in the models' buffers; returns what the last stage measured."""
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

        def finish(hidden: Tensor, microbatch: DeviceMicrobatch) -> tuple[Tensor, Measured]:
            return self._head.loss(hidden, self._last_chunk.output_weight, microbatch, loss, denominators, self._clock)

        with self._policy_weights():
            return self._schedule.run(prepared, finish, reduce_fully=reduce_fully)

    def _scored(self, hidden: Tensor, microbatch: DeviceMicrobatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return hidden.new_zeros(()), self._head.log_probs(hidden, self._last_chunk.output_weight, microbatch)

    def _over_ranks(self, metrics: dict[str, Metric], timings: dict[str, Metric]) -> dict[str, Metric]:
        """Of the ranks that hold the same tokens' values one speaks for all."""
        coords = self.groups.coords
        is_reporting_rank = self.groups.is_last_stage and coords.tp == 0 and coords.cp == 0
        everywhere: list[dict[str, Metric]] = [{} for _ in range(self.groups.layout.world_size)]
        dist.all_gather_object(everywhere, {**timings, **(metrics if is_reporting_rank else {})})
        return merge(everywhere)

    def _names_of_parameters(self) -> list[dict[torch.nn.Parameter, str]]:
        held = ((self._parameter(held), held.parameter.name) for held in self._held)
        return [{found: name for found, name in held if isinstance(found, torch.nn.Parameter)}]

    @torch.no_grad()
    def _exchange(self, weights: Weights) -> None:
        """Exchange policy and `weights` in place, one tensor at a time: no second copy of the model is made on the device."""
        self._quantiser.weights_changed()
        for key, parameter in self._parameters.items():
            current = parameter.cpu().clone()
            parameter.copy_(weights[key])
            weights[key].copy_(current)
