"""Random weights of the shrunken model, chosen so that each of them changes the result."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.conversion import write_hf_checkpoint
from megatron_rl.weight_mapping import ParameterTable, Role

_VOCABULARY_SCALE = 3.5
"""Standard deviation of the logits at temperature 1, which gives keep-sets from one id to many."""
_SCALE = 1.2
"""Each linear layer keeps the scale of its input, so that routers and attention are far from uniform and from one-hot."""


def write_random_weights(folder: Path, hf_config: Mapping[str, Any], seed: int) -> None:
    """Writes a model folder in fp32, without a tokenizer."""
    table = ParameterTable(hf_config)
    write_hf_checkpoint(folder, random_weights(table, seed), hf_config, dtype=torch.float32)


def random_weights(table: ParameterTable, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights by Hugging Face name.

    Norms are around 1 and biases differ from 0: those of a new model (1 and 0) would hide that two of them are exchanged.

    Args:
        table: The parameters of the model.
        seed: Of the random generator.

    Returns:
        An iterator over names and fp32 tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    per_input = table.architecture.hidden_size**-0.5
    for name, shape in table.hf_shapes.items():
        role = table.by_hf_name(name)[0].role
        scale = {Role.NORM: 0.2, Role.BIAS: 0.3, Role.SELECTION_BIAS: 0.2}.get(role)
        if scale is None:
            scale = (_VOCABULARY_SCALE if role in (Role.EMBEDDING, Role.OUTPUT) else _SCALE) * per_input
        values = torch.randn(shape, generator=generator) * scale
        yield name, values + 1.0 if role is Role.NORM else values
