"""The rearrangements themselves, against loops that spell them out. Sizes are mutually different, so a transpose shows."""

import pytest
import torch

from megatron_rl.topology import LayoutError
from megatron_rl.weight_mapping.param_mappings import DirectMapping, GateUpMapping, ParamMapping, QkvMapping, VocabularyMapping
from megatron_rl.weight_mapping.sharding import Split

QKV = QkvMapping(num_heads=8, num_query_groups=2, head_dim=3, inputs=5)
GATE_UP = GateUpMapping(width=12, inputs=7)
PADDED = VocabularyMapping(vocab_size=9, padded_vocab_size=12, columns=5)
COLUMNS = DirectMapping((7, 20), Split(1))
MAPPINGS = [QKV, GATE_UP, PADDED, COLUMNS, DirectMapping((7, 5))]


def random_parts(mapping: ParamMapping) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in mapping.part_shapes]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: type(mapping).__name__)
def test_split_inverts_fuse(mapping: ParamMapping) -> None:
    parts = random_parts(mapping)
    full = mapping.fuse(parts)
    assert tuple(full.shape) == mapping.shape
    for part, back in zip(parts, mapping.split(full), strict=True):
        assert torch.equal(part, back)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: type(mapping).__name__)
def test_shards_make_up_the_full_tensor(mapping: ParamMapping, size: int) -> None:
    parts = random_parts(mapping)
    full = mapping.fuse(parts)
    shards = [mapping.sharding.shard(full, rank, size) for rank in range(size)]
    assert torch.equal(mapping.sharding.unshard(shards), full)
    for rank, shard in enumerate(shards):
        assert tuple(shard.shape) == mapping.sharding.shard_shape(mapping.shape, size)
        assert torch.equal(mapping.shard_from_hf(parts, rank, size), shard)


def test_query_groups_are_interleaved() -> None:
    q, k, v = random_parts(QKV)
    expected = []
    for group in range(2):
        for head in range(group * 4, group * 4 + 4):
            expected += list(q[head * 3 : head * 3 + 3])
        expected += list(k[group * 3 : group * 3 + 3]) + list(v[group * 3 : group * 3 + 3])
    assert torch.equal(QKV.fuse([q, k, v]), torch.stack(expected))


def test_more_ranks_than_query_groups_cut_plain_row_blocks() -> None:
    full = QKV.fuse(random_parts(QKV))
    shards = [QKV.shard_from_hf(random_parts(QKV), rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(shards), full)


def test_gate_and_up_of_a_rank_belong_to_the_same_neurons() -> None:
    gate, up = random_parts(GATE_UP)
    second = GATE_UP.sharding.shard(GATE_UP.fuse([gate, up]), 1, 3)
    assert torch.equal(second, torch.cat([gate[4:8], up[4:8]]))


def test_padding_is_zero_and_below_the_vocabulary() -> None:
    (rows,) = random_parts(PADDED)
    full = PADDED.fuse([rows])
    assert torch.equal(full[:9], rows)
    assert full[9:].abs().max() == 0
    # The last of 12 ranks hold padding only.
    assert PADDED.shard_from_hf([rows], 11, 12).abs().max() == 0


def test_a_vocabulary_is_never_cut_short() -> None:
    with pytest.raises(LayoutError, match="padded vocabulary 8 is smaller than the vocabulary 9"):
        VocabularyMapping(vocab_size=9, padded_vocab_size=8, columns=5)


def test_views_where_nothing_moves() -> None:
    (rows,) = random_parts(DirectMapping((7, 5)))
    assert DirectMapping((7, 5)).fuse([rows]) is rows
    full = torch.randn(24, 7)
    assert all(part.data_ptr() in range(full.data_ptr(), full.data_ptr() + 24 * 7 * 4) for part in GATE_UP.split(full))


@pytest.mark.parametrize(
    ("mapping", "size", "message"),
    [
        (GATE_UP, 5, "12 along dimension 0 in each of 2 blocks of shape"),
        (COLUMNS, 3, "20 along dimension 1 of shape"),
        (QKV, 3, "8 heads in 2 query groups do not divide over 3 ranks"),
    ],
)
def test_a_cut_that_does_not_come_out_even_is_refused(mapping: ParamMapping, size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        mapping.check_size(size)
