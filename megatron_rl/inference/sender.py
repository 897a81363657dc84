"""The contract of a weight update: tensors (`WeightSource`), transport (`WeightSender`), calls to a server (`ServerControl`).

`weight_sync.update_servers` says in which order they are used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.wire.tensor_spec import TensorSpec, dtype_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ServerAddress:
    """A rollout server, such as `ServerAddress("server-0", "http://127.0.0.1:8000")`."""

    name: str
    url: str


class ServerControl(Protocol):
    """Calls to one server. Each raises ServerError, and may be used from several threads."""

    @property
    def address(self) -> ServerAddress:
        """The server that is called."""
        ...

    def pause(self) -> None:
        """Freeze all requests where they are, and drop all keys and values of the current weights.

        On resume each request is recomputed under the new weights, so a token's log-prob is that of the version that sampled it,
        given everything before it.
        """
        ...

    def start_update(self) -> None:
        """Expect new weights. From here on until `finish_update` the model is no version's."""
        ...

    def receive(self, announcement: Mapping[str, Any]) -> None:
        """Announce what will be streamed; returns when the server has received and loaded all of it, however long that takes."""
        ...

    def finish_update(self, version: int) -> None:
        """The weights are complete: they are policy version `version`."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Must raise where some of them stay: a later prompt would hit old keys and values."""
        ...

    def resume(self) -> None:
        """Continue the requests that `pause` froze, and take new ones."""
        ...


class WeightSource(Protocol):
    """The policy's weights under their Hugging Face names.

    `specs` is known without gathering anything. Iterating gathers one tensor after another; it is a collective of the trainer's
    ranks, so all of them must iterate the same number of times, to the end. Each iteration is a fresh pass, in `specs`' order.
    A sender keeps several tensors at a time, so each stays as it was given until the pass has ended.
    """

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Name, dtype and shape of every tensor."""
        ...

    def __iter__(self) -> Iterator[tuple[str, "torch.Tensor"]]: ...


class WeightSender(Protocol):
    """A transport from trainer rank 0 to the servers of one engine. It is given the `ServerControl`s of that same engine."""

    def connect(self, servers: Sequence[Any]) -> Mapping[str, str]:
        """Have a working group with exactly these servers.

        Args:
            servers: The engine's own `ServerControl`s, which may offer more calls than the protocol (to join a group).

        Returns:
            Name and reason of every server that could not be reached.
        """
        ...

    def announcement(self, specs: Sequence[TensorSpec], version: int) -> Mapping[str, Any]:
        """What each server needs to know of the stream before it comes; goes to `ServerControl.receive`."""
        ...

    def stream(self, source: WeightSource) -> Mapping[str, str]:
        """Iterate `source` exactly once, to its end whatever happens to the servers, and send it to those that `connect` reached.

        Returns:
            Name and reason of every server that did not get all of it. Raises only what `source` raises.
        """
        ...

    def confirm(self, server: Any, version: int) -> None:
        """Check that the server (the engine's own `ServerControl`) now holds `version`.

        Raises:
            ServerError: It does not.
        """
        ...

    def disconnect(self, server: str) -> None:
        """Send no more to the server of this name."""
        ...

    def close(self) -> None:
        """Leave all groups."""
        ...


def checked_tensors(source: WeightSource) -> Iterator[tuple[TensorSpec, "torch.Tensor"]]:
    """`source`'s tensors, each with the spec that announced it.

    The receivers lay out their buffers by the announcement, so a stream that strays from it would be loaded under wrong names.

    Raises:
        ValueError: At the first tensor that differs from its spec in name, dtype or shape, or when there are more or fewer
            tensors than specs.
    """
    tensors = iter(source)
    for spec in source.specs:
        name, tensor = next(tensors, (None, None))
        if name != spec.name or tensor is None:
            raise ValueError(f"the weight source yielded {name!r} where its specs announce {spec.name!r}; the order must agree")
        if dtype_name(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise ValueError(
                f"the weight source yielded {name!r} as {dtype_name(tensor.dtype)} {list(tensor.shape)} where its specs announce "
                f"{spec.dtype} {list(spec.shape)}; the receivers have laid out their buffers by the announcement"
            )
        yield spec, tensor
    surplus = next(tensors, None)
    if surplus is not None:
        raise ValueError(f"the weight source yielded {surplus[0]!r} after the last of its {len(source.specs)} specs")
