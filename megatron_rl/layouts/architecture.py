"""What a model is, read from its Hugging Face config: plain values, from which the engine makes Megatron's config."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention with `num_heads` query heads over `num_query_groups` key-value heads, each `head_dim` wide; no biases."""

    num_heads: int
    num_query_groups: int
    head_dim: int
    qk_norm: bool
    """RMSNorm over each head of q and k, one weight of [head_dim] for all heads (Qwen3)."""


@dataclass(frozen=True)
class MixtureOfExperts:
    """The sparse layers. Routing is softmax over all experts, then the `top_k` largest."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Width of one expert."""
    layers: tuple[int, ...]
    """Numbers of the layers that have experts; the others are dense."""
    normalize_top_k: bool
    """True: the chosen probabilities are divided by their sum. False: they are used as the softmax gave them."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head, in halves (not interleaved pairs)."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    """linear: positions are divided by `factor`. llama3: low frequencies are, with the constants of Llama 3.1."""
    factor: float = 1.0


@dataclass(frozen=True)
class ModelArchitecture:
    """A pre-norm decoder with RMSNorm, rotary positions and SwiGLU MLPs without biases."""

    model_type: str
    """As in config.json, e.g. "qwen3_moe"."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    """True size, as in config.json: padding for tensor parallelism is not part of the model."""
    ffn_hidden_size: int
    """Width of the MLP in dense layers."""
    attention: GroupedQueryAttention
    moe: MixtureOfExperts | None
    rope: Rope
    norm_eps: float
    tie_word_embeddings: bool
    """The output layer uses the embedding's weight."""
    max_position_embeddings: int
    initializer_range: float
    """Standard deviation of freshly made weights."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.moe.layers if self.moe else ()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        sparse = set(self.moe_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in sparse)

    @property
    def moe_layer_freq(self) -> list[int]:
        """Megatron's `moe_layer_freq`: 1 for a layer with experts, 0 for a dense one."""
        sparse = set(self.moe_layers)
        return [int(layer in sparse) for layer in range(self.num_layers)]
