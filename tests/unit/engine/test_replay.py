"""Rows are checked before any router sees them, and a handle gives each pass its own rows."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.engine.replay import LayerRoutes, RouteError, Routes, RoutingReplay, make_routes

NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K = 6, 2, 5, 3


def rows() -> np.ndarray:
    """u8 [N, L, K]"""
    random = np.random.default_rng(0)
    return random.random((NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.uint8)


def routes_of(
    experts: np.ndarray,
    recorded: np.ndarray | None = None,
    *,
    positions: np.ndarray = np.arange(NUM_TOKENS),  # noqa: B008 - never changed
    num_experts: int = NUM_EXPERTS,
) -> Routes:
    return make_routes(
        experts, np.ones(len(experts), dtype=bool) if recorded is None else recorded, positions, own=np.arange(NUM_TOKENS),
        num_layers=NUM_LAYERS, num_experts=num_experts, top_k=TOP_K, device=torch.device("cpu"),
    )  # fmt: skip


def changed(change: Callable[[np.ndarray], None]) -> np.ndarray:
    experts = rows()
    change(experts)
    return experts


def out_of_range(experts: np.ndarray) -> None:
    experts[4, 1, 2] = NUM_EXPERTS


def repeated(experts: np.ndarray) -> None:
    experts[2, 0, 2] = experts[2, 0, 0]


def no_route(experts: np.ndarray) -> None:
    experts[3] = 255


@pytest.mark.parametrize(
    ("experts", "rule"),
    [
        (rows()[:-1], "tokens, MoE layers of this rank, experts per token"),
        (np.concatenate([rows(), rows()[:1]]), "tokens, MoE layers of this rank, experts per token"),
        (rows()[..., :1], "experts per token"),
        (np.concatenate([rows(), rows()[..., :1]], axis=-1), "experts per token"),
        (rows()[:, :1], "MoE layers of this rank"),
        (rows().astype(np.int16), "uint8 or uint16"),
        (changed(out_of_range), "position 4, MoE layer 1 of this rank"),
        (changed(repeated), "position 2, MoE layer 0 of this rank"),
        (changed(no_route), "position 3, MoE layer 0 of this rank"),
    ],
    ids=["short", "long", "narrow", "wide", "a layer less", "signed", "out of range", "repeated", "no route"],
)
def test_a_bad_row_is_refused_by_name(experts: np.ndarray, rule: str) -> None:
    with pytest.raises(RouteError, match=rule):
        routes_of(experts)


def test_uint8_cannot_name_300_experts() -> None:
    with pytest.raises(RouteError, match="more than 256 experts need uint16"):
        routes_of(rows(), num_experts=300)


def test_rows_without_a_route_are_not_looked_at() -> None:
    recorded = np.array([True, True, True, False, True, True])
    found = routes_of(changed(no_route), recorded)
    assert found.recorded is not None and found.recorded.tolist() == recorded.tolist()
    assert routes_of(rows()).recorded is None


def test_a_rank_gets_the_rows_of_its_tokens_by_layer() -> None:
    found = routes_of(rows())
    assert found.experts.dtype == torch.int64
    assert np.array_equal(found.experts.numpy(), rows().transpose(1, 0, 2))


def test_rows_of_another_rank_are_refused() -> None:
    with pytest.raises(RouteError, match="row 0 is of position 1, not 0; rule"):
        routes_of(rows(), positions=np.arange(NUM_TOKENS) + 1)


def live(scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> tuple[Tensor, Tensor]:
    values, places = scores.topk(topk, dim=1)
    return values, places


SCORES = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(0))


def asked(handle: LayerRoutes) -> Tensor:
    return handle.get_replay_topk(SCORES, TOP_K, None, None, live)[1]


def experts(seed: int) -> Tensor:
    return torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :TOP_K]


def test_recomputation_takes_the_rows_of_the_oldest_forward_pass() -> None:
    handle = LayerRoutes(1, recomputes=True)
    seen = []
    for microbatch in (1, 2):
        handle.bind(experts(microbatch), None)
        seen.append(asked(handle))
        handle.unbind(keep=True)
    handle.bind(experts(3), None)  # a forward pass between two backward passes
    assert torch.equal(asked(handle), experts(3))
    handle.unbind(keep=True)
    assert all(torch.equal(asked(handle), rows) for rows in (*seen, experts(3)))
    assert handle.forget() == 0


def test_a_pass_without_a_backward_leaves_nothing() -> None:
    handle = LayerRoutes(1, recomputes=True)
    handle.bind(experts(1), None)
    handle.unbind(keep=False)
    assert torch.equal(asked(handle), live(SCORES, TOP_K)[1])  # nothing bound: the router chooses
    assert handle.forget() == 0


def test_tokens_without_a_route_go_where_the_router_sends_them() -> None:
    handle = LayerRoutes(1)
    recorded = torch.tensor([True, False, True, True, False, True])
    handle.bind(torch.where(recorded[:, None], experts(1), 255), recorded)
    values, found = handle.get_replay_topk(SCORES, TOP_K, None, None, live)
    assert torch.equal(found, torch.where(recorded[:, None], experts(1), live(SCORES, TOP_K)[1]))
    assert torch.equal(values, SCORES.gather(1, found))


def test_scores_carry_gradient_to_the_replayed_experts() -> None:
    scores = SCORES.clone().requires_grad_()
    handle = LayerRoutes(1)
    handle.bind(experts(1), None)
    handle.get_replay_topk(scores, TOP_K, None, None, live)[0].sum().backward()
    assert torch.equal(scores.grad, torch.zeros_like(SCORES).scatter(1, experts(1), 1.0))


def test_a_router_with_another_number_of_tokens_is_refused() -> None:
    handle = LayerRoutes(3)
    handle.bind(experts(1)[:-1], None)
    with pytest.raises(RouteError, match="layer 3 has 6 tokens x 3 experts"):
        asked(handle)


class StandInRouter(torch.nn.Module):
    router_replay = None


def layer(number: int) -> torch.nn.Module:
    """As Megatron's MoE layers are made: layer.mlp.router, layer.config."""
    built = torch.nn.Module()
    built.mlp = torch.nn.Module()
    built.mlp.router = StandInRouter()
    built.layer_number = number
    built.config = SimpleNamespace(
        moe_router_fusion=False, moe_router_load_balancing_type="none", recompute_granularity=None, recompute_modules=[]
    )
    return built


def test_a_layer_for_multi_token_prediction_routes_freely() -> None:
    """The sampler never runs it, so that no rollout records its routes: the rows belong to the decoder's layers alone."""
    chunk, ahead = torch.nn.Module(), layer(3)
    chunk.decoder, chunk.mtp = torch.nn.Module(), torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([layer(1), layer(2)])
    chunk.mtp.layers = torch.nn.ModuleList([torch.nn.Module()])
    chunk.mtp.layers[0].transformer_layer = ahead
    replay, routes = RoutingReplay([chunk]), routes_of(rows())
    with replay.bound(0, routes, backward_follows=True):
        for number, decoder_layer in enumerate(chunk.decoder.layers):
            assert torch.equal(asked(decoder_layer.mlp.router.router_replay), routes.experts[number])
        assert ahead.mlp.router.router_replay is None
    replay.end_schedule()
