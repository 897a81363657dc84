"""What a model family defines: how its config is read, and its mapping rules."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_rl.weight_mapping.architecture import ModelArchitecture
from megatron_rl.weight_mapping.mtp_rules import mtp_parameters
from megatron_rl.weight_mapping.naming import LOCAL, NamingScheme
from megatron_rl.weight_mapping.parameter import Parameter
from megatron_rl.weight_mapping.rules import MappingRule, expand


class Family(ABC):
    """One `model_type` of Hugging Face."""

    model_type: str
    causal_lm: str
    """Name of the class in the config's `architectures`: a checkpoint with another head has other tensors."""
    written_out: Mapping[str, Any] = MappingProxyType({})
    """Keys that every written config.json gets: a server needs them, and not every source has them."""

    @abstractmethod
    def architecture(self, hf_config: Mapping[str, Any]) -> ModelArchitecture:
        """Read config.json.

        Raises:
            UnsupportedArchitectureError: Lists everything in it that cannot be expressed.
        """

    @abstractmethod
    def rules(self, model: ModelArchitecture, padded_vocab_size: int, naming: NamingScheme) -> list[MappingRule]:
        """The family's mapping rules for one model.

        Args:
            model: The model's architecture.
            padded_vocab_size: Rows of Megatron's embedding and output layer.
            naming: How Megatron names the parameters.
        """

    def parameters(
        self, model: ModelArchitecture, padded_vocab_size: int | None = None, naming: NamingScheme = LOCAL
    ) -> list[Parameter]:
        """All parameters with global layer and expert numbers, in the order of the forward pass."""
        padded = model.vocab_size if padded_vocab_size is None else padded_vocab_size
        return expand(self.rules(model, padded, naming), model.num_layers)

    def mtp_parameters(self, model: ModelArchitecture, naming: NamingScheme = LOCAL) -> list[Parameter]:
        """The parameters of the MTP layers, which `parameters` leaves out."""
        return mtp_parameters(model, lambda deeper: self.rules(deeper, deeper.vocab_size, naming))
