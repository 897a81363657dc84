"""What the records of a model look like: written when a run is prepared, read by every process of the run."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from megatron_rl.errors import RunError
from megatron_rl.records.atomic_file import write_atomically


class ModelContractError(RunError):
    """A run's file that cannot be read as a model contract."""


@dataclass(frozen=True)
class ModelContract:
    """What a rollout of this model must look like. Example: `ModelContract(151936, (0, 1, 2), 128, 8)`."""

    vocab_size: int
    """Token ids are in 0..vocab_size - 1."""
    moe_layers: tuple[int, ...]
    """Numbers of the layers with experts, ascending; empty for a dense model, whose rollouts have no routes. An engine may
    record routes for every layer; the records have them for these only."""
    num_experts: int
    """0 for a dense model."""
    experts_per_token: int
    """0 for a dense model."""

    @property
    def num_moe_layers(self) -> int:
        """0 for a dense model."""
        return len(self.moe_layers)

    def limited_to(self, num_tokens: int) -> Self:
        """The same for a tokenizer of `num_tokens` tokens: further rows of the embedding are padding, in no keep-set."""
        return replace(self, vocab_size=min(self.vocab_size, num_tokens))


def write_model_contract(file: Path, contract: ModelContract) -> None:
    """Write the file that `read_model_contract` reads."""
    write_atomically(file, json.dumps(asdict(contract)).encode())


def read_model_contract(file: Path) -> ModelContract:
    """The contract that a run's preparation wrote.

    Raises:
        ModelContractError: The file is missing or is not a contract.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return ModelContract(**{**found, "moe_layers": tuple(found["moe_layers"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelContractError(
            f"{file}: cannot be read as a model contract ({error}); start the run again, which writes it"
        ) from error
