"""Scalars in TensorBoard's file format, written directly: the packages for it import torch, which the orchestrator must not.

The file is a sequence of records (length, its checksum, data, its checksum); each record is one protobuf message `Event`, of
which four fields are needed: wall_time 1, step 2, file_version 3, summary 5 (value 1: tag 1, simple_value 2).
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_CASTAGNOLI = 0x82F63B78  # reversed polynomial of CRC-32C


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


class TensorBoardFile:
    """One events file in `folder`; a resumed run adds a file of its own, which TensorBoard reads after the first."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now}"
        self._file = open(folder / name, "wb")  # noqa: SIM115 - open until close()
        self._append(_double(1, now / 1e9) + _message(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """One event with all values of a step."""
        summary = b"".join(_message(1, _message(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._append(_double(1, wall_time) + _integer(2, step) + _message(5, summary))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
        self._file.flush()


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# Protobuf: a field is its key, (number << 3 | wire type), then its value.


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3 | 0) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _message(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    with np.errstate(over="ignore"):  # a number beyond float32 is infinite there, and no reason to stop
        return _varint(number << 3 | 5) + np.float32(value).tobytes()
