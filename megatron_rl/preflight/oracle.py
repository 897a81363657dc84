"""The reference of every number: transformers' model in float64, one sequence at a time, with recorded experts forced."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_rl.conversion.model_files import read_config
from megatron_rl.weight_mapping import ParameterTable, UnknownFamilyError, family_of


class Choices(TorchFunctionMode):
    """A context in which every router's choice of experts is recorded, and recorded experts replace it where they are given.

    A router is a top-k over a matrix [num_tokens, num_experts]. What it computes from the chosen scores is unchanged, so that
    gradients flow through it.
    """

    def __init__(self, num_experts: int, top_k: int, experts: Tensor | None = None, recorded: Tensor | None = None) -> None:
        """Sets what to force.

        Args:
            num_experts: Experts of a MoE layer.
            top_k: Experts per token.
            experts: Experts to force, i64 [num_tokens, num_moe_layers, top_k], layers in order; None: the routers choose.
            recorded: Tokens for which they are forced, bool [num_tokens].
        """
        super().__init__()
        self._shape, self._experts, self._recorded = (num_experts, top_k), experts, recorded
        self.chosen: list[Tensor] = []
        """Experts that were used, one i64 [num_tokens, top_k] per MoE layer."""
        self.margin = float("inf")
        """Smallest difference between the scores of the last chosen and the first rejected expert."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        found = function(*args, **kwargs)
        if function not in (torch.topk, Tensor.topk):
            return found
        scores, k = args[0], kwargs["k"] if "k" in kwargs else args[1]
        if scores.dim() != 2 or (scores.shape[1], k) != self._shape:  # a top-k over groups of experts
            return found
        return self._choose(scores, found.indices)

    def _choose(self, scores: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        if scores.shape[1] > live.shape[1]:
            with torch.no_grad():
                ordered = scores.detach().sort(dim=1, descending=True).values
                self.margin = min(self.margin, float((ordered[:, live.shape[1] - 1] - ordered[:, live.shape[1]]).min()))
        experts = live
        if self._experts is not None:
            assert self._recorded is not None
            experts = torch.where(self._recorded[:, None], self._experts[:, len(self.chosen)], live)
        self.chosen.append(experts)
        return scores.gather(1, experts), experts


class Oracle:
    """A saved model, loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        """Loads the model.

        Args:
            folder: A Hugging Face model folder.

        Raises:
            UnknownFamilyError: transformers has no class for the model.
        """
        self._config = read_config(folder)
        self.architecture = ParameterTable(self._config).architecture
        self.model = _load(folder, self._config)

    def logits(self, tokens: np.ndarray, experts: np.ndarray | None = None) -> tuple[Tensor, Choices | None]:
        """Runs one sequence.

        Args:
            tokens: Ids, [num_tokens].
            experts: Experts to force on the first R tokens, [R, num_moe_layers, top_k]; the routers choose those of the others,
                and of all if it is None.

        Returns:
            Logits, f64 [num_tokens, vocab_size], and the routers' choices; these are None for a dense model.
        """
        moe = self.architecture.moe
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        if moe is None:
            return self.model(input_ids=ids, use_cache=False).logits[0], None
        with self._choices(len(tokens), experts) as choices:
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        assert len(choices.chosen) == len(moe.layers), f"{len(choices.chosen)} routers chose, the model has {len(moe.layers)}"
        return logits, choices

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Gradients of a loss in float64; transformers saves them as it saves weights, which gives the names of a checkpoint.

        Args:
            loss: Scalar, differentiable with respect to the model's parameters.

        Returns:
            Gradients by checkpoint name.
        """
        self.model.zero_grad()
        loss.backward()
        parameters = dict(self.model.named_parameters())
        weights = {name: parameter.data for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        try:
            with TemporaryDirectory() as folder:
                self.model.save_pretrained(folder)
                found = {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
        finally:
            for name, parameter in parameters.items():
                parameter.data = weights[name]
        buffers = {name for name, _ in self.model.named_buffers()}
        return {name: tensor for name, tensor in found.items() if name not in buffers}

    @contextmanager
    def _choices(self, num_tokens: int, experts: np.ndarray | None) -> Iterator[Choices]:
        moe = self.architecture.moe
        assert moe is not None
        forced = recorded = None
        if experts is not None:
            forced = torch.zeros((num_tokens, len(moe.layers), moe.top_k), dtype=torch.int64)
            forced[: len(experts)] = torch.from_numpy(experts.astype(np.int64))
            recorded = torch.arange(num_tokens) < len(experts)
        with Choices(moe.num_experts, moe.top_k, forced, recorded) as choices:
            yield choices


def check_known_to_transformers(hf_config: Mapping[str, Any]) -> None:
    """Checks that transformers has the model's class.

    Args:
        hf_config: config.json of the model.

    Raises:
        UnknownFamilyError: It has not, so that there is nothing to compare with.
    """
    _class_of(hf_config)


def _class_of(hf_config: Mapping[str, Any]) -> type[transformers.PreTrainedModel]:
    name = family_of(hf_config).causal_lm
    found = getattr(transformers, name, None)
    if found is None:
        raise UnknownFamilyError(
            f"transformers {transformers.__version__} has no {name} (model_type {hf_config.get('model_type')!r}), so that "
            "the model cannot be compared with a reference; install a version that has it"
        )
    return found


def _load(folder: Path, hf_config: Mapping[str, Any]) -> transformers.PreTrainedModel:
    kind = _class_of(hf_config)
    # The class's config and model_type: a family under another name (kimi_k2) has none, and by the type transformers knows how a
    # checkpoint's names become its own. Eager: the fused kernels do not support float64.
    assert kind.config_class is not None
    config = kind.config_class(**{key: value for key, value in hf_config.items() if key != "model_type"})
    config._experts_implementation = "eager"
    transformers.utils.logging.disable_progress_bar()  # it would mix with the check's output
    loaded: Any = kind.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, loading = loaded
    assert not loading["missing_keys"], f"transformers filled {sorted(loading['missing_keys'])[:5]}, ... with random numbers"
    # transformers gives the norms of latent attention 1e-6 whatever the config says; vLLM and Megatron, which have to agree, give
    # them rms_norm_eps, which for Moonlight is 1e-5.
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps
    return model.double().eval()
