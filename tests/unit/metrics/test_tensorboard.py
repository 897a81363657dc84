"""The events file against bytes known from elsewhere: checksums of the CRC-32C standard, records decoded by their definition."""

import struct

import pytest

from megatron_rl.metrics.tensorboard import TensorBoardFile, crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (bytes(range(32)), 0x46DD794E)],
)
def test_checksums_of_the_standard(data, expected):
    """The check value of CRC-32C and the examples of RFC 3720, appendix B.4."""
    assert crc32c(data) == expected


def records(data: bytes) -> list[bytes]:
    """TFRecord: u64 length, u32 masked checksum of it, data, u32 masked checksum of that."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked(body)
        found.append(body)
        data = data[16 + length :]
    return found


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def fields(data: bytes) -> list[tuple[int, object]]:
    """(field number, value) of a protobuf message."""
    found = []
    while data:
        key, data = varint(data)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, data = varint(data)
        elif kind == 2:
            length, data = varint(data)
            value, data = data[:length], data[length:]
        else:
            form = {1: "<d", 5: "<f"}[kind]
            value, data = struct.unpack(form, data[: struct.calcsize(form)])[0], data[struct.calcsize(form) :]
        found.append((number, value))
    return found


def varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for place, byte in enumerate(data):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, data[place + 1 :]
    raise AssertionError("a varint without end")


def test_what_is_written_is_what_the_format_says(tmp_path):
    file = TensorBoardFile(tmp_path / "tb")
    file.scalars(3, {"reward_mean": 0.5, "probe/ratio_mean": 1.0}, wall_time=1234.5)
    file.scalars(1000, {"name of more than 127 characters " * 5: float("inf")}, wall_time=1235.0)
    (path,) = (tmp_path / "tb").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    head, *events = [dict(fields(r)) for r in records(path.read_bytes())]  # flushed with each event
    file.close()
    assert head[3] == b"brain.Event:2"
    assert [(e[1], e[2]) for e in events] == [(1234.5, 3), (1235.0, 1000)]
    values = [[dict(fields(v)) for _, v in fields(e[5])] for e in events]
    assert values == [
        [{1: b"reward_mean", 2: 0.5}, {1: b"probe/ratio_mean", 2: 1.0}],
        [{1: b"name of more than 127 characters " * 5, 2: float("inf")}],
    ]


def test_a_resumed_run_adds_a_file(tmp_path):
    for _ in range(2):
        TensorBoardFile(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_number_beyond_float32_does_not_stop_the_run(tmp_path):
    file = TensorBoardFile(tmp_path)
    file.scalars(0, {"x": 1e300}, wall_time=0.0)
    file.close()
