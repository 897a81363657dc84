"""The reference of a family: transformers' own model, which also writes the checkpoint."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron_rl.batching import SupervisedExample
from megatron_rl.conversion import HfCheckpoint


def save_random(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Every tensor random: norms that are all ones or biases of zero would hide that they are exchanged."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in name:
            torch.nn.init.normal_(tensor, 1.0, 0.2) if "norm" in name else torch.nn.init.normal_(tensor, 0.0, 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB")


class Reference:
    """Scores, gradients and routes of a saved model, one sequence after the other, in fp32."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = HfCheckpoint.open(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.routes: dict[tuple[int, int], list[frozenset[int]]] = {}
        self._number = 0
        for layer, block in enumerate(self.model.model.layers):
            if hasattr(block.mlp, "experts"):
                block.mlp.experts.register_forward_pre_hook(self._note(layer))

    def run(self, examples: tuple[SupervisedExample, ...]) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Log-probs by sequence, and gradients of their mean under the checkpoint's names, for tensors that are named alike."""
        log_probs, count = {}, sum(len(e.solution_ids) for e in examples)
        for self._number, example in enumerate(examples):
            ids = torch.tensor([example.prompt_ids + example.solution_ids])
            logits = self.model(ids, use_cache=False).logits[0, :-1].float()
            found = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            (-found.sum() / count).backward()
            log_probs[self._number] = found.detach()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if name in self._checkpoint and p.grad is not None}
        return log_probs, gradients

    def _note(self, layer: int):
        def hook(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            chosen = next(a for a in arguments if not a.is_floating_point())
            self.routes[self._number, layer] = [frozenset(row.tolist()) for row in chosen.reshape(-1, chosen.shape[-1])]

        return hook
