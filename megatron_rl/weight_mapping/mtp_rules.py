"""Multi-token prediction (MTP) layers: a decoder layer each, with the norms and the projection that feed it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rl.weight_mapping.architecture import ModelArchitecture
from megatron_rl.weight_mapping.naming import LAYER
from megatron_rl.weight_mapping.param_mappings import DirectMapping
from megatron_rl.weight_mapping.parameter import Parameter, Region, Role
from megatron_rl.weight_mapping.rules import HF_LAYER, MappingRule, expand
from megatron_rl.weight_mapping.sharding import Split


def mtp_parameters(model: ModelArchitecture, rules_of: Callable[[ModelArchitecture], Sequence[MappingRule]]) -> list[Parameter]:
    """The parameters of all MTP layers.

    Hugging Face numbers these layers after the last decoder layer; Megatron keeps them apart, on the last pipeline stage. Each is
    built like the last decoder layer.

    Args:
        model: The model, with `num_mtp_layers` of them.
        rules_of: The family's rules for a model.

    Returns:
        Their parameters; `layer` is Hugging Face's number.
    """
    first, count = model.num_layers, model.num_mtp_layers
    moe = model.moe and replace(model.moe, layers=(*model.moe.layers, *range(first, first + count)))
    deeper = replace(model, num_layers=first + count, moe=moe)
    found: list[Parameter] = []
    for parameter in expand(rules_of(deeper), deeper.num_layers):
        if parameter.layer is not None and parameter.layer >= first:
            template = parameter.template.replace(LAYER, f"mtp.layers.{parameter.layer - first}.transformer_layer.")
            found.append(replace(parameter, template=template, region=Region.LAST))
    for layer in range(first, first + count):
        found += [parameter for rule in _projection_rules(model, layer - first) for parameter in rule.parameters(layer)]
    return found


def mtp_copies(model: ModelArchitecture) -> dict[str, str]:
    """Hugging Face names in MTP layers of tensors that only repeat another one, with that one's name.

    Published checkpoints repeat embedding and output layer in each MTP layer; Megatron shares them.
    """
    own = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    layers = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    return {HF_LAYER.format(layer=layer) + name: source for layer in layers for name, source in own.items()}


def _projection_rules(model: ModelArchitecture, number: int) -> list[MappingRule]:
    hidden = model.hidden_size
    norms = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
    rules = [
        MappingRule(
            f"mtp.layers.{number}.{megatron}.weight",
            (f"{HF_LAYER}{hf}.weight",),
            DirectMapping((hidden,)),
            Role.NORM,
            Region.LAST,
        )
        for megatron, hf in norms.items()
    ]
    # Both sides put the token's embedding before the hidden state.
    joined = DirectMapping((hidden, 2 * hidden), Split(0))
    return [
        *rules,
        MappingRule(f"mtp.layers.{number}.eh_proj.weight", (HF_LAYER + "eh_proj.weight",), joined, Role.MLP, Region.LAST),
    ]
