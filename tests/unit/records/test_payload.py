"""Payload files: what is written is read, slice by slice; a file that is not whole is refused by name."""

import os
import stat
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.records import Payload, PayloadError, Sampling, check_rollout, write_atomically, write_payload
from tests.unit.records.random_rollouts import CONTRACT, make_rollout


def written(path, num_rollouts=3, **options):
    rng = np.random.default_rng(7)
    rollouts = [
        make_rollout(rng, f"g000001.{i}", num_prompt=2 + i, num_completion=1 + 2 * i, **options) for i in range(num_rollouts)
    ]
    size = write_payload(path, rollouts)
    assert size == path.stat().st_size
    return rollouts


def assert_same(a, b):
    for name in ("prompt_ids", "completion_ids", "logprobs", "routed_experts", "policy_versions", "loss_mask"):
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for name in ("ids", "offsets"):
        assert getattr(a.keep_sets, name).dtype == getattr(b.keep_sets, name).dtype, name
        np.testing.assert_array_equal(getattr(a.keep_sets, name), getattr(b.keep_sets, name), err_msg=name)
    for name in ("uid", "sampling", "finish_reason", "reward"):
        assert getattr(a, name) == getattr(b, name)


def test_round_trip(tmp_path):
    path = tmp_path / "g.safetensors"
    rollouts = written(path, tool_tokens=(0,))
    payload = Payload(path)
    assert len(payload) == 3
    for i, rollout in enumerate(rollouts):
        assert_same(payload.rollout(i), rollout)
        check_rollout(payload.rollout(i), CONTRACT)


def test_wide_integers_are_stored_in_the_records_dtypes(tmp_path):
    """A worker may hold int64 ids; routes keep the dtype that they came in, for the check to judge."""
    rollout = make_rollout(np.random.default_rng(0))
    wide = replace(
        rollout, prompt_ids=rollout.prompt_ids.astype(np.int64), routed_experts=rollout.routed_experts.astype(np.uint16)
    )
    write_payload(tmp_path / "g.safetensors", [wide])
    read = Payload(tmp_path / "g.safetensors").rollout(0)
    assert read.prompt_ids.dtype == np.int32 and read.routed_experts.dtype == np.uint16


@pytest.mark.parametrize("layers", [(0,), (2,), (1, 2), (2, 0), (0, 1, 2), ()])
def test_of_the_routes_only_the_wanted_layers_in_their_order(tmp_path, layers):
    path = tmp_path / "g.safetensors"
    rollouts = written(path)
    for i, rollout in enumerate(rollouts):
        routes = Payload(path).rollout(i, layers).routed_experts
        np.testing.assert_array_equal(routes, rollout.routed_experts[:, list(layers)])


def test_a_dense_models_rollouts_have_empty_routes(tmp_path):
    contract = replace(CONTRACT, moe_layers=())
    rollouts = written(tmp_path / "g.safetensors", contract=contract)
    read = Payload(tmp_path / "g.safetensors").rollout(1)
    assert read.routed_experts.shape == rollouts[1].routed_experts.shape == (5, 0, 2)


def test_an_untruncated_rollout_has_no_kept_ids(tmp_path):
    rollouts = written(tmp_path / "g.safetensors", sampling=Sampling())
    assert_same(Payload(tmp_path / "g.safetensors").rollout(2), rollouts[2])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_a_half_file_is_refused_by_name(tmp_path, share):
    path = tmp_path / "g000001.safetensors"
    written(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(PayloadError, match=r"g000001\.safetensors"):
        Payload(path)


def test_a_missing_file_a_foreign_file_and_a_missing_record_are_refused(tmp_path):
    with pytest.raises(PayloadError, match="absent"):
        Payload(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("{}" * 100)
    with pytest.raises(PayloadError, match="text"):
        Payload(tmp_path / "text.safetensors")
    path = tmp_path / "g.safetensors"
    written(path)
    for index in (-1, 3):
        with pytest.raises(PayloadError, match=f"record {index}"):
            Payload(path).rollout(index)


def test_a_layer_that_the_file_does_not_hold_is_refused(tmp_path):
    path = tmp_path / "g.safetensors"
    written(path)
    with pytest.raises(PayloadError, match="layer"):
        Payload(path).rollout(0, (1, 3))


def test_writing_is_all_or_nothing_and_private(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_atomically(path, b"old")

    def no_disk(fd):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_disk)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
