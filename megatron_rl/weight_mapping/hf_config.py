"""Reads a Hugging Face config so that nothing in it is ignored by accident.

Every key is read by a family, known not to affect the logits, or an error. All problems are collected and raised together.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_rl.weight_mapping.architecture import Rope, Yarn
from megatron_rl.weight_mapping.errors import UnsupportedArchitectureError

# Keys that do not affect the function from token ids to logits: identity of the file, special tokens, generation, inference
# caches, and settings of training objectives (auxiliary losses), which belong to this program's own config.
_NEUTRAL = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "transformers_weights",
    "unk_token_id",
    "use_cache",
    "use_return_dict",
}
_NEUTRAL_PREFIXES = ("unsloth_", "transformers.js")
"""Of keys that tools write for themselves."""

_REQUIRED = object()


class ConfigReader:
    """Reads values of one config; `finish` raises what was wrong and which keys were not read."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self._config = hf_config
        self._taken: set[str] = set()
        self._problems: list[str] = []

    def integer(self, *keys: str, default: Any = _REQUIRED) -> int:
        """A positive integer under the first of `keys` that is there (a key may have aliases)."""
        value = self._value(keys, default)
        if type(value) is not int or value < 1:
            self._reject(keys, value, "must be a positive integer")
            return 1
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None where the key is null or absent."""
        return None if self._value((key,), None) is None else self.integer(key)

    def count(self, key: str, default: int) -> int:
        """An integer, 0 or more."""
        value = self._value((key,), default)
        if type(value) is not int or value < 0:
            self._reject((key,), value, "must be an integer, 0 or more")
            return default
        return value

    def experts(self, *keys: str) -> tuple[int, int]:
        """Number of experts, under the first of `keys` that is there, and experts per token."""
        num_experts, top_k = self.integer(*keys), self.integer("num_experts_per_tok")
        if top_k > num_experts:
            self.reject(f"num_experts_per_tok = {top_k} is more than {keys[0]} = {num_experts}")
        return num_experts, top_k

    def number(self, key: str, default: float) -> float:
        """An integer or a float, as a float."""
        value = self._value((key,), default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._reject((key,), value, "must be a number")
            return float(default)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value((key,), default)
        if not isinstance(value, bool):
            self._reject((key,), value, "must be true or false")
        return bool(value)

    def layer_list(self, key: str, num_layers: int) -> tuple[int, ...]:
        """Layer numbers below `num_layers`; absent or null: empty."""
        value = self._value((key,), [])
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < num_layers for n in value):
            self._reject((key,), value, f"must be a list of layer numbers in 0..{num_layers - 1}")
            return ()
        return tuple(value)

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Accept only some values of a key.

        Args:
            key: The key; absent or null counts as the first of `allowed`.
            allowed: The accepted values.
            why: The reason, in the error message.
        """
        value = self._value((key,), allowed[0])
        if value not in allowed:
            self._reject((key,), value, why)

    def strings(self, key: str) -> list[str]:
        """A list of names; absent or null: empty."""
        value = self._value((key,), [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._reject((key,), value, "must be a list of names")
            return []
        return value

    def skip(self, *keys: str) -> None:
        """Accept any value of these keys; the caller knows that it has no effect."""
        self._taken.update(keys)

    def rope(self, default_theta: float = 10000.0, default_fraction: float | None = None) -> Rope:
        """The rotary embedding, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

        Args:
            default_theta: Base frequency where the config has none.
            default_fraction: Fraction of each head that is rotated where the config does not say, for a family that can rotate a
                part of it; None: the family rotates complete heads.
        """
        settings = self._value(("rope_parameters", "rope_scaling"), {})
        if self._config.get("rope_scaling") not in (None, settings):
            self.reject("rope_scaling contradicts rope_parameters; remove the one that is wrong")
        if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
            self._reject(("rope_parameters",), settings, "must be one flat table; frequencies by layer type are not supported")
            return Rope(default_theta)
        settings = dict(settings)
        # transformers 4 wrote theta outside the table, and some files have it in both places.
        outside = self._value(("rope_theta",), None)
        theta = settings.pop("rope_theta", outside if outside is not None else default_theta)
        kind = settings.pop("rope_type", settings.get("type", "default"))
        settings.pop("type", None)
        if outside is not None and outside != theta:
            self._reject(("rope_theta",), outside, f"contradicts rope_parameters, which say {theta}")
        factor = settings.pop("factor", 1.0) if kind != "default" else 1.0
        fraction = self._rotary_fraction(settings, default_fraction)
        if kind == "yarn":
            return Rope(float(theta), kind, float(factor), fraction, self._yarn(settings))
        expected = {"default": {}, "linear": {}, "llama3": _LLAMA3_CONSTANTS}.get(kind)
        if expected is None:
            self._reject(("rope_type",), kind, "is not supported; known are default, linear, llama3, yarn")
            return Rope(float(theta))
        self._compare_rope(kind, settings, expected)
        return Rope(float(theta), kind, float(factor), fraction)

    def finish(self) -> None:
        """Return if the config is understood.

        Raises:
            UnsupportedArchitectureError: Lists everything that was wrong, and the keys that were not read.
        """
        for key, value in self._config.items():
            # A null, false or empty value enables nothing.
            is_neutral = key in _NEUTRAL or key.startswith(_NEUTRAL_PREFIXES)
            if key not in self._taken and not is_neutral and value not in (None, False, [], {}):
                self._problems.append(
                    f"{key} = {value!r}: this family does not know the key, and it may change the model; "
                    "remove it from config.json if it does not"
                )
        if self._problems:
            kind = self._config.get("model_type")
            raise UnsupportedArchitectureError(f"config of model_type {kind!r}:\n  " + "\n  ".join(self._problems))

    def reject(self, problem: str) -> None:
        """Note a problem that involves several keys."""
        self._problems.append(problem)

    def _value(self, keys: tuple[str, ...], default: Any) -> Any:
        self._taken.update(keys)
        for key in keys:
            if self._config.get(key) is not None:
                return self._config[key]
        return None if default is _REQUIRED else default

    def _reject(self, keys: tuple[str, ...], value: Any, rule: str) -> None:
        what = "is missing, and it" if value is None else f"= {value!r}"
        self._problems.append(f"{' or '.join(keys)} {what} {rule}")

    def _rotary_fraction(self, settings: dict[str, Any], default: float | None) -> float:
        """`partial_rotary_factor`, inside the rope's settings (transformers 5) or next to them (before)."""
        inside, outside = settings.pop("partial_rotary_factor", None), self._value(("partial_rotary_factor",), None)
        if None not in (inside, outside) and inside != outside:
            self._reject(("partial_rotary_factor",), outside, f"contradicts rope_parameters, which say {inside}")
        found = next((value for value in (inside, outside, default) if value is not None), 1.0)
        if default is None and found != 1.0:
            self._reject(("partial_rotary_factor",), found, "is not supported by this family, which rotates complete heads")
        return float(found)

    def _yarn(self, settings: dict[str, Any]) -> Yarn:
        given = {key: value for key, value in settings.items() if value is not None}
        known = {field.name: field.type for field in fields(Yarn)}
        for key in given.keys() - known.keys():
            self.reject(f"rope of type yarn: {key} = {given[key]!r}: not known")
        if "original_max_position_embeddings" not in given:
            self.reject("rope of type yarn: original_max_position_embeddings is missing")
        return Yarn(**{"original_max_position_embeddings": 1, **{key: value for key, value in given.items() if key in known}})

    def _compare_rope(self, kind: str, settings: dict[str, Any], expected: dict[str, float]) -> None:
        settings = {**expected, **settings}
        for key, value in settings.items():
            if key not in expected or value != expected[key]:
                rule = f"Megatron's constant is {expected[key]}" if key in expected else "not known"
                self.reject(f"rope of type {kind}: {key} = {value!r}: {rule}")


# Megatron-Core fixes them in RotaryEmbedding._apply_scaling; only the factor is an argument.
_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
