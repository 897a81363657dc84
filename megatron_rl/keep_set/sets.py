"""Which tokens are scored, over which ids: the input of the operation, and its contract."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from megatron_rl.records import ContractError, RaggedIds


class TokenKind(IntEnum):
    """What is computed for one position.

    Given for each position, and not derived from an empty set: a set that was lost on its way must end in an error, whereas an
    empty set that means "no value wanted" would silently give log-prob 0, the value of a singleton.
    """

    UNSCORED = 0  # prompt, tool output, padding: value 0, no gradient, no work; its set is empty
    KEEP_SET = 1  # normalised over its own set, which is not empty and holds the target
    FULL = 2  # normalised over the full vocabulary; its set is empty


@dataclass(frozen=True)
class KeepSets:
    """T positions of which each predicts one target token; position t keeps `keep_ids[keep_offsets[t]:keep_offsets[t + 1]]`.

    Ids are global vocabulary ids, in any order, each once per set. The tensors share one device, which may be the CPU while the
    hidden states are on a GPU: the shard plan is then made without waiting for the GPU, and only what it selects is copied.
    Example: target_ids [7, 2, 9], kinds [KEEP_SET, UNSCORED, FULL], keep_ids [5, 7], keep_offsets [0, 2, 2, 2].
    """

    target_ids: Tensor  # int64 [T]; anything where unscored
    kinds: Tensor  # uint8 [T], of TokenKind
    keep_ids: Tensor  # int32 [nnz]
    keep_offsets: Tensor  # int64 [T + 1], rising from 0 to nnz

    def __post_init__(self) -> None:
        """Raises ValueError on shapes and dtypes alone; `check_keep_sets` looks at the values."""
        num_tokens, num_pairs = self.target_ids.numel(), self.keep_ids.numel()
        contract = {
            "target_ids": (torch.int64, num_tokens),
            "kinds": (torch.uint8, num_tokens),
            "keep_ids": (torch.int32, num_pairs),
            "keep_offsets": (torch.int64, num_tokens + 1),
        }
        for name, (dtype, length) in contract.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != (length,) or tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} ({length},)")

    @classmethod
    def from_ragged(cls, target_ids: np.ndarray, scored: np.ndarray, full: np.ndarray, sets: RaggedIds) -> "KeepSets":
        """The tensors of a microbatch's arrays, on the CPU; the one place where recorded sets become tensors.

        Args:
            target_ids: i64 [T].
            scored: bool [T], positions that need a value.
            full: bool [T], those of them that no truncation touched.
            sets: Keep-sets of T rows; empty where a position is not scored, or over the full vocabulary.
        """
        kinds = np.where(full, TokenKind.FULL, TokenKind.KEEP_SET) * scored
        arrays = (target_ids, kinds.astype(np.uint8), sets.ids, sets.offsets)
        dtypes = (torch.int64, torch.uint8, torch.int32, torch.int64)
        return cls(*(torch.from_numpy(np.ascontiguousarray(a)).to(dtype) for a, dtype in zip(arrays, dtypes, strict=True)))

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.target_ids.numel()

    @property
    def device(self) -> torch.device:
        """The device of all four tensors."""
        return self.target_ids.device

    def sizes(self) -> Tensor:
        """int64 [T]: ids kept at each position."""
        return self.keep_offsets.diff()


def check_keep_sets(keep_sets: KeepSets, *, vocab_size: int, locate: Callable[[int], tuple[str, int]] | None = None) -> None:
    """Refuse sets that break the contract; meant to run once, on CPU data, before anything is scored.

    Args:
        keep_sets: Keep-sets of all positions.
        vocab_size: Ids without padding.
        locate: Names the rollout, and the token within it, of a position; by default "unnamed" and the position itself.

    Raises:
        ContractError: With rollout, token, value and rule of the first offender.
    """
    locate = locate or (lambda position: ("unnamed", position))
    for positions, values, rule in _violations(keep_sets, vocab_size):
        if positions.numel():
            rollout, token = locate(int(positions[0]))
            raise ContractError(rollout=rollout, token=token, value=values[0].tolist(), rule=rule)


def _violations(sets: KeepSets, vocab_size: int) -> Iterator[tuple[Tensor, Tensor, str]]:
    """(positions, values, rule) of each rule in turn; a later rule may rely on the earlier ones."""
    sizes, kinds, targets = sets.sizes(), sets.kinds, sets.target_ids
    everywhere = torch.arange(sets.num_tokens, device=sets.device)

    def where(bad: Tensor, values: Tensor, rule: str) -> tuple[Tensor, Tensor, str]:
        return everywhere[bad], values[bad], rule

    num_pairs, begin, end = sets.keep_ids.numel(), sets.keep_offsets[:1], sets.keep_offsets[-1:]
    yield begin.new_zeros(int(begin != 0)), begin, "keep_offsets begin at 0"
    yield end.new_zeros(int(end != num_pairs)), end, f"keep_offsets end at {num_pairs}, the number of ids"
    yield where(sizes < 0, sizes, "keep_offsets never fall")
    yield where(kinds > max(TokenKind), kinds, "kinds are UNSCORED, KEEP_SET or FULL")
    yield where(
        (kinds == TokenKind.KEEP_SET) & (sizes == 0),
        sizes,
        "a KEEP_SET token keeps at least one id (is the rollout's distribution NaN?)",
    )
    yield where((kinds != TokenKind.KEEP_SET) & (sizes != 0), sizes, "only KEEP_SET tokens have a set")
    outside = (targets < 0) | (targets >= vocab_size)
    yield where(
        (kinds != TokenKind.UNSCORED) & outside,
        targets,
        f"target ids must be in 0..{vocab_size - 1}, the vocabulary without its padding",
    )

    owner = torch.repeat_interleave(everywhere, sizes)
    ids = sets.keep_ids.long()
    bad = (ids < 0) | (ids >= vocab_size)
    yield owner[bad], ids[bad], f"keep-set ids must be in 0..{vocab_size - 1}, the vocabulary without its padding"
    key, _ = torch.sort(owner * vocab_size + ids)
    repeated = key[1:][key[1:] == key[:-1]]
    yield repeated // vocab_size, repeated % vocab_size, "an id is in a keep-set once"
    found = torch.zeros_like(kinds, dtype=torch.bool)
    found[owner[ids == targets[owner]]] = True
    yield where((kinds == TokenKind.KEEP_SET) & ~found, targets, "the target is in its keep-set")
