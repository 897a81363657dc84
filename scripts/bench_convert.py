"""Speed and memory of `megatron-rl convert`, compared with a plain copy of the same bytes in the same run.

    python scripts/bench_convert.py --gib 4 --json result.json

Writes a synthetic Qwen3-MoE of this size. Then, for each direction, measures a plain copy of the source's files (read, write,
fsync) and the conversion, each in a separate process and with the page cache of its source dropped. Prints, and writes to the
JSON file:

copy_share: throughput of the slower direction, divided by that of the plain copy.
peak_over_largest_tensor: peak anonymous memory of the converting process above that of its imports, divided by the bytes of the
model's largest tensor.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CHUNK = 16 << 20
_SAMPLE_S = 0.01


def model_of(gib: float) -> dict[str, Any]:
    """Qwen3-MoE with as many layers as the size needs; the embedding is its largest tensor."""
    hidden, width, experts = 1024, 512, 64
    layer = 2 * (3 * experts * width * hidden + 2 * hidden * 2048 + 2 * hidden * 512)
    embeddings = 2 * 2 * 65_536 * hidden
    layers = max(1, round((gib * (1 << 30) - embeddings) / layer))
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 65_536, "hidden_size": hidden,
        "intermediate_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": width, "num_experts": experts, "num_experts_per_tok": 4, "max_position_embeddings": 4096,
    }  # fmt: skip


def write_model(folder: Path, config: dict[str, Any]) -> None:
    import torch

    from megatron_rl.conversion import write_hf_checkpoint
    from megatron_rl.weight_mapping import ParameterTable

    noise = torch.randn(1 << 20).to(torch.bfloat16)

    def values() -> Iterable[tuple[str, torch.Tensor]]:
        for name, shape in ParameterTable(config).hf_shapes.items():
            count = torch.Size(shape).numel()
            yield name, noise.repeat(-(-count // len(noise)))[:count].view(shape)

    write_hf_checkpoint(folder, values(), config, dtype=torch.bfloat16)


def copy_folder(source: Path, out: Path) -> None:
    out.mkdir()
    for file in files_of(source):
        reading, writing = os.open(file, os.O_RDONLY), os.open(out / file.name, os.O_WRONLY | os.O_CREAT)
        while chunk := os.read(reading, _CHUNK):
            os.write(writing, chunk)
        os.fsync(writing)
        os.close(reading)
        os.close(writing)


def files_of(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.is_file()]


def drop_from_cache(folder: Path) -> None:
    for file in files_of(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no line RssAnon (anonymous memory); use Linux 4.5 or later")


def measured(work: Callable[[], None], answer: Connection) -> None:
    """Sends the seconds of `work`, and its peak anonymous memory above what was in use before."""
    import megatron_rl.conversion  # noqa: F401 - imports are not measured

    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    answer.send((seconds, peak))


def in_separate_process(work: Callable[..., None], source: Path, out: Path) -> tuple[float, int]:
    drop_from_cache(source)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(work, source, out, theirs))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def _run(work: Callable[..., None], source: Path, out: Path, answer: Connection) -> None:
    measured(lambda: work(source, out), answer)


def convert_to_megatron(source: Path, out: Path) -> None:
    from megatron_rl.conversion import hf_to_megatron

    hf_to_megatron(source, out)


def convert_to_hf(source: Path, out: Path) -> None:
    from megatron_rl.conversion import megatron_to_hf

    megatron_to_hf(source, out)


def bench(folder: Path, gib: float) -> dict[str, Any]:
    from megatron_rl.weight_mapping import ParameterTable

    config = model_of(gib)
    write_model(folder / "hf", config)
    largest = max(2 * _numel(shape) for shape in ParameterTable(config).hf_shapes.values())
    result: dict[str, Any] = {
        "gib": sum(f.stat().st_size for f in files_of(folder / "hf")) / (1 << 30),
        "largest_tensor_bytes": largest,
    }
    shares, peaks = [], []
    for name, work, source, out in (
        ("hf_to_megatron", convert_to_megatron, "hf", "megatron"),
        ("megatron_to_hf", convert_to_hf, "megatron", "back"),
    ):
        copy_s, _ = in_separate_process(copy_folder, folder / source, folder / "copy")
        seconds, peak = in_separate_process(work, folder / source, folder / out)
        for file in files_of(folder / "copy"):
            file.unlink()
        (folder / "copy").rmdir()
        shares.append(copy_s / seconds)
        peaks.append(peak / largest)
        result[name] = {"copy_s": copy_s, "convert_s": seconds, "copy_share": shares[-1], "peak_over_largest_tensor": peaks[-1]}
    return result | {"copy_share": min(shares), "peak_over_largest_tensor": max(peaks)}


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description="Throughput and memory of checkpoint conversion.")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the synthetic model")
    parser.add_argument("--folder", type=Path, help="folder for the files (three times the size); default: temporary")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        result = bench(Path(scratch), arguments.gib)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
