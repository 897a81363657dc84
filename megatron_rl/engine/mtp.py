"""Multi-token prediction: layers after the last one that predict the token after the next, trained by their own loss.

Their inputs are detached, so that the policy's gradients are the same with and without them: hidden states, the embedding of the
next token, and the output layer are the policy's, and only read. Their routers choose for themselves: a sampler does not run
these layers, and no rollout records where they sent a token.
"""

import copy
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.megatron_types import megatron_attributes
from megatron_rl.keep_set import KeepSets
from megatron_rl.records import RaggedIds
from megatron_rl.weight_mapping import ModelArchitecture

_TRANSFORMER_LAYER = "transformer_layer"
_TRANSFORMER_LAYER_SINCE_0_17 = "mtp_model_layer"


def mtp_settings(model: ModelArchitecture, *, trained: bool) -> dict[str, Any]:
    """Arguments of TransformerConfig.

    Args:
        model: What the model is.
        trained: Whether the run trains its layers for multi-token prediction.

    Raises:
        UnsupportedModelError: There is nothing to train.
    """
    if not trained:
        return {}
    if not model.num_mtp_layers:
        raise UnsupportedModelError(
            f"model.mtp = 'trained', but this {model.model_type} has no layer for multi-token prediction "
            "(num_nextn_predict_layers in its config.json); leave model.mtp out"
        )
    return {"mtp_num_layers": model.num_mtp_layers}


def mtp_spec(settings: Any, decoder: Any, *, transformer_engine: bool, vp_stage: int | None) -> Any | None:
    """Layers like the decoder's last one, on the chunk that ends the pipeline; None elsewhere, and where they are not trained."""
    if not settings.mtp_num_layers:
        return None
    return get_gpt_mtp_block_spec(settings, decoder, use_transformer_engine=transformer_engine, vp_stage=vp_stage)


def local_name(name: str, chunk: GPTModel) -> str:
    """A parameter's name in this version of Megatron-Core; in checkpoints all versions have the older one."""
    layers = getattr(getattr(chunk, "mtp", None), "layers", ())
    renamed = any(hasattr(layer, _TRANSFORMER_LAYER_SINCE_0_17) for layer in layers)
    return name.replace(f".{_TRANSFORMER_LAYER}.", f".{_TRANSFORMER_LAYER_SINCE_0_17}.") if renamed else name


def transformer_layers(chunk: GPTModel) -> list[TransformerLayer]:
    """The transformer layers of a chunk: the decoder's, and those inside of its multi-token prediction layers."""
    ahead = getattr(getattr(chunk, "mtp", None), "layers", ())
    return [*chunk.decoder.layers, *(getattr(x, _TRANSFORMER_LAYER_SINCE_0_17, None) or x.transformer_layer for x in ahead)]


def prepare_layers(chunk: GPTModel) -> None:
    """Fix the layers of a chunk once it is built: their recomputation, and their part in the gradient norm."""
    for layer in chunk.mtp.layers:
        # With full recomputation 0.16.1 hands the packing to autograd, which takes tensors only. One layer more is kept instead.
        layer.config = copy.copy(layer.config)
        layer.config.recompute_granularity = None
    for parameter in chunk.mtp.parameters():
        # Megatron's gradient norm leaves out what is marked as a copy. With these gradients in it, clipping would shorten the
        # policy's steps by what multi-token prediction has to learn.
        megatron_attributes(parameter).shared = True


def hidden_states_ahead(
    chunk: GPTModel, hidden: Tensor, tokens: Tensor, positions: Tensor, packing: Any, rotary: dict[str, Tensor | None]
) -> Tensor:
    """Run the layers for multi-token prediction.

    Args:
        chunk: The one that ends the pipeline.
        hidden: [n, 1, H], the policy's.
        tokens: i64 [1, n].
        positions: i64 [1, n].
        packing: Megatron's PackedSeqParams.
        rotary: The rotary embedding's tensors, by the name of the argument.

    Returns:
        [(1 + layers) * n, 1, H]: the hidden states that were given, followed by those of each layer.
    """

    def embedding(**ids: Tensor) -> Tensor:
        return chunk.embedding(**ids).detach()

    every = chunk.mtp(
        input_ids=tokens,
        position_ids=positions,
        hidden_states=hidden.detach().requires_grad_(),
        attention_mask=None,
        packed_seq_params=packing,
        embedding=embedding,
        **rotary,
    )
    return torch.cat([hidden, every[hidden.shape[0] :]])


def targets_ahead(microbatch: Microbatch, depth: int, own: np.ndarray) -> tuple[KeepSets, np.ndarray]:
    """What a layer predicts: at each position the target of the position `depth` later in the same sequence.

    Args:
        microbatch: N positions.
        depth: Number of the layer, from 1.
        own: i64 [n], this rank's positions.

    Returns:
        The targets of the positions `own`, over the full vocabulary, and bool [N]: which of all positions have a loss.
    """
    targets, scored = np.zeros_like(microbatch.targets), np.zeros_like(microbatch.loss_mask)
    for start, end in zip(microbatch.segment_ends, microbatch.segment_ends[1:], strict=False):
        targets[start : max(start, end - depth)] = microbatch.targets[start + depth : end]
        scored[start : max(start, end - depth)] = microbatch.loss_mask[start + depth : end]
    return KeepSets.from_ragged(targets[own], scored[own], scored[own], RaggedIds.empty(len(own))), scored
