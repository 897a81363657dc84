"""What is sent, and what a transport has to offer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from megatron_rl.inference.vllm.control import ServerRoutes
from megatron_rl.wire.weights import WeightMeta


class WeightSource(Protocol):
    """The policy's weights under their Hugging Face names.

    `metas` is known without gathering anything. Iterating gathers one tensor after another; it is a collective of the trainer's
    ranks, so all of them must iterate the same number of times, to the end. Each iteration is a fresh pass, in `metas`' order.
    """

    @property
    def metas(self) -> Sequence[WeightMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class WeightSender(Protocol):
    """A transport from trainer rank 0 to the weight transfer engines of the servers."""

    backend: str
    """vLLM's name for the engine at the other end (`--weight-transfer-config`)."""

    def connect(self, servers: Sequence[ServerRoutes]) -> Mapping[str, str]:
        """Have a working group with exactly these servers; for those that could not be reached, name and reason."""
        ...

    def announcement(self, metas: Sequence[WeightMeta], version: int) -> dict:
        """What the servers are told in /update_weights."""
        ...

    def stream(self, source: WeightSource) -> Mapping[str, str]:
        """Iterate `source` exactly once, to its end whatever happens to the servers, and send it to those that `connect` reached.

        Returns name and reason for every server that did not get all of it. Raises only what `source` raises.
        """
        ...

    def confirm(self, server: ServerRoutes, version: int) -> None:
        """ServerError unless the server holds `version` now."""
        ...

    def disconnect(self, server: str) -> None:
        """Send no more to this server."""
        ...

    def close(self) -> None: ...


def checked_tensors(source: WeightSource) -> Iterator[tuple[WeightMeta, torch.Tensor]]:
    """`source`'s tensors, each with the meta that announced it; ValueError at the first one that differs in name, or in number.

    The receivers lay out their buffers by the announcement, so a stream that strays from it would be loaded under wrong names.
    """
    tensors = iter(source)
    for meta in source.metas:
        name, tensor = next(tensors, (None, None))
        if name != meta.name:
            raise ValueError(f"the weight source yielded {name!r} where its metas announce {meta.name!r}; the order must agree")
        yield meta, tensor
    surplus = next(tensors, None)
    if surplus is not None:
        raise ValueError(f"the weight source yielded {surplus[0]!r} after the last of its {len(source.metas)} metas")
