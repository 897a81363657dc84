"""Routing replay: each microbatch goes to the experts that its rollouts recorded, under any schedule.

Megatron's own RouterReplay keeps one list for the whole process and accepts whatever it is given. Here each MoE layer of a model
has its own handle, which its router asks in place of Megatron's object. For every microbatch the engine checks the rows
once, binds them for the forward pass of one chunk, and leaves them in the handles' queues for the recomputation in the
backward pass:

    forward  of microbatch i:  bind(rows i) ... the routers use rows i ... unbind: rows i join the queue
    recompute of microbatch i: the routers take the oldest rows of the queue

Backward visits the microbatches of a chunk in the order of their forward passes, in the 1F1B and in the interleaved schedule,
so that the oldest rows are always the right ones, however many microbatches are in flight. Nothing is shared between models.

Tokens without a recorded route (a sequence's last position, padding) go where the live router sends them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_rl.errors import RunError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer


class RouteError(RunError, ValueError):
    """Routes that a router cannot follow: the message names the place, the value and the rule."""


@dataclass(frozen=True)
class Routes:
    """Experts of the tokens that one rank's routers see, T of them, for L layers."""

    experts: Tensor  # i64 [L, T, K]
    recorded: Tensor | None  # bool [T]; None: every token has a route


def make_routes(
    experts: np.ndarray,
    recorded: np.ndarray,
    positions: np.ndarray,
    *,
    own: np.ndarray,
    num_layers: int,
    num_experts: int,
    top_k: int,
    device: torch.device,
) -> Routes:
    """Check the rows of one microbatch, cut to this rank's tokens.

    Args:
        experts: u8 | u16 [T, L, K], the layers in the order of the model.
        recorded: bool [T], which rows have a route.
        positions: i64 [T], the rows' positions among the N of the microbatch.
        own: i64 [T], the positions that this rank's routers see.
        num_layers: L, MoE layers of this rank.
        num_experts: Number of experts of a layer.
        top_k: K, experts per token.
        device: Device of the routers.

    Raises:
        RouteError: At the first broken rule.
    """
    if not np.array_equal(positions, own):
        count = min(len(positions), len(own))
        differing = np.flatnonzero(positions[:count] != own[:count])
        first = (
            f"; row {differing[0]} is of position {positions[differing[0]]}, not {own[differing[0]]}" if len(differing) else ""
        )
        raise RouteError(
            f"{len(positions)} routes are not those of this rank's {len(own)} tokens{first}; "
            "rule: routes are cut by the layout and the coordinates of their own rank (batching.cut_routes)"
        )
    shape = (len(own), num_layers, top_k)
    if experts.shape != shape:
        raise RouteError(f"routes of shape {experts.shape}; rule: [tokens, MoE layers of this rank, experts per token] = {shape}")
    if experts.dtype not in (np.uint8, np.uint16):
        raise RouteError(f"routes of dtype {experts.dtype}; rule: uint8 or uint16, which cannot hold a 'no route' marker")
    if experts.dtype == np.uint8 and num_experts > 256:
        raise RouteError(f"uint8 routes for {num_experts} experts; rule: more than 256 experts need uint16")
    _check_rows(experts, recorded, num_experts, positions)
    ordered = torch.from_numpy(np.ascontiguousarray(experts.transpose(1, 0, 2))).to(torch.int64)
    mask = None if recorded.all() else torch.from_numpy(recorded).to(device)
    return Routes(ordered.to(device), mask)


def _check_rows(experts: np.ndarray, recorded: np.ndarray, num_experts: int, positions: np.ndarray) -> None:
    def refuse(bad: np.ndarray, what: str, rule: str) -> None:
        if bad.any():
            token, layer = np.argwhere(bad)[0][:2]
            found = experts[token, layer].tolist()
            raise RouteError(f"position {positions[token]}, MoE layer {layer} of this rank: experts {found} {what}; rule: {rule}")

    asked = recorded[:, None, None]
    refuse((experts >= num_experts) & asked, "are out of range", f"experts must be in 0..{num_experts - 1}")
    ordered = np.sort(experts, axis=-1)
    refuse((ordered[..., 1:] == ordered[..., :-1]) & asked, "repeat one", "a token goes to each of its experts once")


@dataclass
class LayerRoutes:
    """The handle of one router. Megatron's router calls `get_replay_topk` in place of its own top-k."""

    layer_number: int
    """Megatron's, from 1; 0.19 sets it again."""
    _bound: tuple[Tensor, Tensor | None] | None = None
    _queue: deque[tuple[Tensor, Tensor | None]] = field(default_factory=deque)
    recomputes: bool = False
    """Whether this layer's router runs a second time in the backward pass."""

    def bind(self, experts: Tensor, recorded: Tensor | None) -> None:
        """Start of a forward pass: its experts, i64 [T, K], and which tokens have a route, bool [T]; None: all."""
        self._bound = (experts, recorded)

    def unbind(self, keep: bool) -> None:
        """End of a forward pass. keep: its backward pass will follow."""
        if keep and self.recomputes:
            assert self._bound is not None
            self._queue.append(self._bound)
        self._bound = None

    def forget(self) -> int:
        """Drop what a schedule left over; returns how many microbatches that was."""
        left = len(self._queue) + (self._bound is not None)
        self._queue.clear()
        self._bound = None
        return left

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token: the bound ones, or the live router's.

        Args:
            scores: [T, experts], the router's.
            topk: K, experts per token.
            num_groups: For the live router: groups of experts.
            group_topk: For the live router: groups that a token may use.
            default_compute_topk: The live router's choice; Megatron always gives it.

        Returns:
            Scores and numbers of the experts of each token, [T, K] each. The scores are gathered, so that gradients reach the
            router.
        """
        assert default_compute_topk is not None
        bound = self._bound if self._bound is not None else (self._queue.popleft() if self._queue else None)
        if bound is None:  # a pass without replay
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts, recorded = bound
        if experts.shape != (scores.shape[0], topk):
            raise RouteError(
                f"layer {self.layer_number} has {scores.shape[0]} tokens x {topk} experts, its routes are {tuple(experts.shape)}"
            )
        if recorded is not None:
            _, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            experts = torch.where(recorded[:, None], experts, live)
        return scores.gather(1, experts), experts


class RoutingReplay:
    """The handles of one model: of each chunk, its MoE layers in order.

    Args:
        chunks: This rank's chunks of the model.
    """

    def __init__(self, chunks: "Sequence[GPTModel]") -> None:
        self._handles = [[_attach(layer) for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")] for chunk in chunks]

    @contextmanager
    def bound(self, chunk: int, routes: Routes | None, *, backward_follows: bool) -> Iterator[None]:
        """Within the block the routers of a chunk follow their own layers of `routes`.

        Args:
            chunk: Number of the chunk on this rank.
            routes: Routes of one microbatch; None: the routers choose.
            backward_follows: Keep the routes for a recomputation in the backward pass.
        """
        handles = self._handles[chunk]
        if routes is None or not handles:
            yield
            return
        first = sum(len(before) for before in self._handles[:chunk])
        for number, handle in enumerate(handles):
            handle.bind(routes.experts[first + number], routes.recorded)
        try:
            yield
        finally:
            for handle in handles:
                handle.unbind(keep=backward_follows)

    def end_schedule(self) -> None:
        """After every schedule: each route that was kept for a recomputation must have been used."""
        left = {handle.layer_number: count for chunk in self._handles for handle in chunk if (count := handle.forget())}
        assert not left, f"routes left over after the backward pass (layer: microbatches): {left}"

    def abandon(self) -> None:
        """Forget everything, after a schedule that failed."""
        for handle in (handle for chunk in self._handles for handle in chunk):
            handle.forget()


def _attach(layer: "TransformerLayer") -> LayerRoutes:
    router, config = layer.mlp.router, layer.config
    if config.moe_router_fusion or config.moe_router_load_balancing_type == "sinkhorn":
        # Both choose experts without asking the handle.
        raise RouteError(
            "routing replay does not reach a fused router or sinkhorn: turn moe_router_fusion off, and set balancing to 'none'"
        )
    recomputes = config.recompute_granularity == "full" or bool(
        config.recompute_granularity and "moe" in config.recompute_modules
    )
    router.router_replay = LayerRoutes(layer.layer_number, recomputes=recomputes)
    return router.router_replay
