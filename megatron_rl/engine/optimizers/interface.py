"""What the engine asks of an optimizer. AdamW and Muon implement it; the engine builds one of them and never asks which."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.parameters import LocalParameters
from megatron_rl.metrics import Metric
from megatron_rl.weight_mapping import ModelArchitecture


class PolicyOptimizer(ABC):
    """The optimizer of one rank. Methods are collectives unless they say otherwise.

    Args:
        config: The run's configuration.
        models: This rank's chunks, wrapped for training.
        parameters: The same chunks' parameters.
        groups: This rank's process groups.
    """

    name: ClassVar[str]
    """The value of `optimizer.name`; checkpoints record it."""

    @abstractmethod
    def __init__(
        self, config: Config, models: Sequence[DistributedDataParallel], parameters: LocalParameters, groups: ParallelGroups
    ) -> None:
        """Start with zero moments and step 0."""

    @classmethod  # noqa: B027 - most optimizers train every model
    def check_model(cls, model: ModelArchitecture, config: Config) -> None:
        """Raise UnsupportedModelError for a model that this optimizer's settings do not fit. No collective."""

    @classmethod
    def model_settings(cls, config: Config) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig that this optimizer needs. No collective."""
        return {}

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear the gradients, those in Megatron's buffers too. No collective."""

    def begin_step(self) -> None:  # noqa: B027 - most optimizers measure nothing in the passes
        """Prepare for the passes of a step: what was measured before belongs to other passes. No collective."""

    @abstractmethod
    def step(self, learning_rate: float) -> float:
        """Update the weights from the reduced gradients.

        Args:
            learning_rate: Learning rate of this step, by the schedule of `learning_rate.learning_rate`.

        Returns:
            The gradient's norm over the complete model, before clipping.
        """

    def metrics(self) -> dict[str, Metric]:
        """What the last step measured, by metric name. No collective."""
        return {}

    @abstractmethod
    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of the part of a parameter that this data-parallel rank updates. No collective.

        Args:
            parameter: One of the model's own tensors.

        Returns:
            Flat tensors by name, views of the state itself: "exp_avg", "exp_avg_sq", "step" and, where the model is not fp32,
            "master". Empty where this rank updates no part of the parameter.
        """

    @abstractmethod
    def sharded_state_dict(
        self, model_state: Mapping[str, Any], metadata: Mapping[str, Any], *, is_loading: bool
    ) -> Mapping[str, Any]:
        """The state for Megatron's distributed checkpoints.

        Args:
            model_state: The model's sharded state dict, whose keys the optimizer's state takes.
            metadata: How the checkpoint is sharded, see checkpoint.py.
            is_loading: True: the state dict describes what to read.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds, read by a `sharded_state_dict` with is_loading = True."""
