"""The rows of a family's table, and their expansion into the parameters of a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.layouts.architecture import GroupedQueryAttention, ModelArchitecture
from megatron_rl.layouts.kinds import GateUp, Kind, QueryKeyValue, Single, VocabularyRows
from megatron_rl.layouts.parameter import HfTensor, Parameter, Region, Role
from megatron_rl.layouts.sharding import Split
from megatron_rl.layouts.spelling import LAYER, Spelling

HF_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Row:
    """One sort of parameter: Megatron's name, the Hugging Face name of each part, its kind, and where it occurs."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    role: Role
    region: Region = Region.LAYER
    layers: Sequence[int] = ()
    """Layers that have it (region LAYER)."""
    num_experts: int | None = None
    """Given: one parameter for each expert of each layer."""

    def parameters(self, layer: int | None) -> Iterator[Parameter]:
        """Its parameters in one layer (None: outside of the layers)."""
        for expert in range(self.num_experts) if self.num_experts is not None else [None]:
            names = [name.format(layer=layer, expert=expert) for name in self.hf]
            tensors = tuple(HfTensor(name, shape) for name, shape in zip(names, self.kind.part_shapes, strict=True))
            yield Parameter(self.megatron, tensors, self.kind, self.role, self.region, layer, expert)


def expand(rows: Sequence[Row], num_layers: int) -> list[Parameter]:
    """All parameters in the order of the forward pass: the order in which checkpoints and updates are streamed."""
    by_layer: list[list[Row]] = [[] for _ in range(num_layers)]
    for row in rows:
        for layer in row.layers:
            by_layer[layer].append(row)
    outside = {region: [row for row in rows if row.region is region] for region in (Region.FIRST, Region.LAST)}
    first = [parameter for row in outside[Region.FIRST] for parameter in row.parameters(None)]
    middle = [parameter for layer, found in enumerate(by_layer) for row in found for parameter in row.parameters(layer)]
    last = [parameter for row in outside[Region.LAST] for parameter in row.parameters(None)]
    return first + middle + last


def vocabulary_rows(model: ModelArchitecture, padded_vocab_size: int) -> list[Row]:
    """Embedding, final norm, and an output layer unless it is the embedding."""
    kind = VocabularyRows(model.vocab_size, padded_vocab_size, model.hidden_size)
    norm = Single((model.hidden_size,))
    rows = [
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), kind, Role.EMBEDDING, Region.FIRST),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), norm, Role.NORM, Region.LAST),
    ]
    if not model.tie_word_embeddings:
        rows.append(Row("output_layer.weight", ("lm_head.weight",), kind, Role.OUTPUT, Region.LAST))
    return rows


def attention_rows(model: ModelArchitecture, attention: GroupedQueryAttention, spelling: Spelling) -> list[Row]:
    """Norm, fused q-k-v, output projection, and the norms of q and k where the model has them; in every layer."""
    layers = range(model.num_layers)
    heads, groups, width, hidden = attention.num_heads, attention.num_query_groups, attention.head_dim, model.hidden_size

    def row(megatron: str, hf: Sequence[str], kind: Kind, role: Role) -> Row:
        return Row(LAYER + megatron, tuple(HF_LAYER + name for name in hf), kind, role, layers=layers)

    fused = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    output = Single((hidden, heads * width), Split(1))
    rows = [
        row(spelling.attention_norm, ["input_layernorm.weight"], Single((hidden,)), Role.NORM),
        row("self_attention.linear_qkv.weight", fused, QueryKeyValue(heads, groups, width, hidden), Role.ATTENTION),
        row("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], output, Role.ATTENTION),
    ]
    if attention.qk_norm:
        for part in "qk":
            rows.append(
                row(f"self_attention.{part}_layernorm.weight", [f"self_attn.{part}_norm.weight"], Single((width,)), Role.NORM)
            )
    return rows


def dense_mlp_rows(model: ModelArchitecture, spelling: Spelling) -> list[Row]:
    """Norm and MLP of the layers without experts."""
    norm = Row(
        LAYER + spelling.dense_mlp_norm,
        (HF_LAYER + "post_attention_layernorm.weight",),
        Single((model.hidden_size,)),
        Role.NORM,
        layers=model.dense_layers,
    )
    fc1, fc2 = mlp_kinds(model.ffn_hidden_size, model.hidden_size)
    gate_up = (HF_LAYER + "mlp.gate_proj.weight", HF_LAYER + "mlp.up_proj.weight")
    return [
        norm,
        Row(LAYER + "mlp.linear_fc1.weight", gate_up, fc1, Role.MLP, layers=model.dense_layers),
        Row(LAYER + "mlp.linear_fc2.weight", (HF_LAYER + "mlp.down_proj.weight",), fc2, Role.MLP, layers=model.dense_layers),
    ]


def mlp_kinds(width: int, hidden: int) -> tuple[GateUp, Single]:
    """Kinds of the two linears of a SwiGLU MLP: [2 * width, hidden] and [hidden, width]."""
    return GateUp(width, hidden), Single((hidden, width), Split(1))
