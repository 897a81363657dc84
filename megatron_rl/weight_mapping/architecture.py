"""A model's architecture as plain values, read from its Hugging Face config; the engine makes Megatron's config from it."""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.records import ModelContract


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention with `num_heads` query heads over `num_query_groups` key-value heads, each `head_dim` wide."""

    num_heads: int
    num_query_groups: int
    head_dim: int
    qk_norm: bool
    """RMSNorm over each head of q and k, one weight of [head_dim] for all heads (Qwen3)."""
    qkv_bias: bool = False
    """Biases on q, k and v (GLM). The output projection has one only with ModelArchitecture.linear_biases."""
    sinks: bool = False
    """Each head has a learned logit that takes part in the softmax and attends to nothing (GPT-OSS)."""
    window: int | None = None
    """In `windowed_layers` a token sees itself and the window - 1 tokens before it."""
    windowed_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2 and later): q, k and v are expanded from low-rank, normalised projections."""

    num_heads: int
    q_lora_rank: int | None
    """None: q is projected directly, without a norm."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Dimensions of each head of q and k that are rotated, in interleaved pairs; those of k are the same for all heads."""
    v_head_dim: int

    @property
    def num_query_groups(self) -> int:
        """Every head has its own k and v."""
        return self.num_heads

    @property
    def q_head_dim(self) -> int:
        """Width of one head of q and k."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MixtureOfExperts:
    """The sparse layers. Each token goes to the `top_k` experts with the largest scores."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Width of one expert."""
    layers: tuple[int, ...]
    """Numbers of the layers with experts, ascending; the others are dense."""
    normalize_top_k: bool
    """True: the chosen scores are divided by their sum. False: they stay as the softmax over all experts computes them."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    """An fp32 vector is added to the scores for the choice of experts only; it is balanced without gradients (DeepSeek-V3)."""
    num_groups: int = 1
    top_k_groups: int = 1
    """Experts are chosen only from this many best groups."""
    scaling_factor: float = 1.0
    """Multiplies the weights of the chosen experts."""
    shared_ffn_hidden_size: int = 0
    """Width of the MLP that every token passes in addition to its experts; 0: none."""


@dataclass(frozen=True)
class Yarn:
    """YaRN's constants, as Hugging Face names them."""

    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    """linear: positions are divided by `factor`. llama3: low frequencies are, with the constants of Llama 3.1."""
    factor: float = 1.0
    fraction: float = 1.0
    """Fraction of each head that is rotated: its first dimensions."""
    yarn: Yarn | None = None


@dataclass(frozen=True)
class ModelArchitecture:
    """A pre-norm decoder with RMSNorm, rotary positions and gated MLPs.

    A checkpoint of a run holds these fields under their names: a renamed field would keep it from being resumed.
    """

    model_type: str
    """The model_type in config.json, e.g. "qwen3_moe"."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    """The vocab_size in config.json, without padding for tensor parallelism."""
    ffn_hidden_size: int
    """Width of the MLP in dense layers."""
    attention: GroupedQueryAttention | LatentAttention
    moe: MixtureOfExperts | None
    rope: Rope
    norm_eps: float
    tie_word_embeddings: bool
    """The output layer uses the embedding's weight."""
    max_position_embeddings: int
    initializer_range: float
    """Standard deviation of random initial weights."""
    linear_biases: bool = False
    """All linear layers of the layers, the router too, have biases (GPT-OSS)."""
    num_mtp_layers: int = 0
    """Layers after the last decoder layer that predict further tokens (multi-token prediction, MTP). They take no part in the
    function from token ids to logits; they have their own loss, or are only kept unchanged."""
    swiglu_limit: float | None = None
    """None: silu(gate) * up. Given: both are clamped to it, then gate * sigmoid(1.702 * gate) * (up + 1) (GPT-OSS)."""

    @property
    def contract(self) -> ModelContract:
        """What rollouts of this model look like."""
        moe = self.moe
        return ModelContract(self.vocab_size, self.moe_layers, moe.num_experts if moe else 0, moe.top_k if moe else 0)

    @property
    def max_positions(self) -> int:
        """The longest sequence that the position embedding reaches.

        The factor times the original length may be more than the config says, where a model card's block was added to it: YaRN
        names that length, and for linear scaling it is the config's own, as vLLM reads it. llama3's is in the config already.
        """
        original = {"linear": self.max_position_embeddings}.get(self.rope.kind, 0)
        if self.rope.yarn:
            original = self.rope.yarn.original_max_position_embeddings
        return max(self.max_position_embeddings, int(self.rope.factor * original))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts; empty for a dense model."""
        return self.moe.layers if self.moe else ()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Numbers of the layers without experts."""
        sparse = set(self.moe_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in sparse)

    @property
    def moe_layer_freq(self) -> list[int]:
        """Megatron's `moe_layer_freq`: 1 for a layer with experts, 0 for a dense one."""
        sparse = set(self.moe_layers)
        return [int(layer in sparse) for layer in range(self.num_layers)]
