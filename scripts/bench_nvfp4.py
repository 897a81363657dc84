"""What NVFP4 adds to a training step, and what it saves in a weight update.

    python scripts/bench_nvfp4.py [--config CONFIG] [--tokens 1024 4096 32768] [--repeats 5] [--json FILE]
        [--section.key value ...]

Trains the config's model (default: the demo's) on one rank, on random rollouts, with full-precision weights and with weights that
are quantised to NVFP4 and back (`precision.training = "qat"`): steps of the two engines alternate in one process. Then a weight
update is packed as the sender packs it, once in bf16 and once in NVFP4, and the bytes of the quantised matrices in its buffers
are counted.

Seconds are CPU time of all threads (nothing waits here; wall-clock time would include the load of others). step_cost_share is
the median of a quantised step over that of a full-precision step, minus 1, at the largest number of tokens. The script stops when
a step quantises a matrix more than once, or when the model has more than four times as many weights as a token uses: the cost of
quantising grows with the weights, that of a step with the tokens, so a sparser model would need more tokens for the same share.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from bench_output_layer import DEMO, random_microbatches
from torch import Tensor

from megatron_rl.config import Config, load_config
from megatron_rl.conversion import random_hf_tensors
from megatron_rl.engine import build_engine, start_process
from megatron_rl.objective import PolicyLoss
from megatron_rl.precision import Selection, fake_quantise, kernels, selection_of
from megatron_rl.trainer.publisher import PolicySource
from megatron_rl.weight_mapping import ParameterTable
from megatron_rl.wire.tensor_spec import TensorSpec
from megatron_rl.wire.weights import pack_bucket, plan_buckets

LARGEST_RATIO = 4.0
"""Ratio of all weights to those that one token uses."""
BUCKET_BYTES = 64 << 20
"""The default of weight_sync.bucket_mib."""


class Quantising:
    """Replaces the engine's fake_quantise: computes the same, and records its seconds and which matrices it was given."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._seen: list[int] = []

    def __call__(self, matrix: Tensor, amax: Tensor) -> Tensor:
        self._seen.append(matrix.data_ptr())
        began = time.process_time()
        values = fake_quantise(matrix, amax)
        self._seconds += time.process_time() - began
        return values

    def read(self) -> tuple[float, int]:
        """Seconds since the last call, and how many matrices were given more than once."""
        seconds, again = self._seconds, len(self._seen) - len(set(self._seen))
        self._seconds, self._seen = 0.0, []
        return seconds, again


def steps(engines: dict, config: Config, table: ParameterTable, num_tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds of a step with full-precision and with quantised weights, and of the quantisation in the latter."""
    microbatches, denominators = random_microbatches(config, table, num_tokens)
    quantising = kernels.fake_quantise
    seconds: dict[str, list[float]] = {arm: [] for arm in (*engines, "quantising")}
    for step in range(repeats + 1):
        for arm, engine in engines.items():
            began = time.process_time()
            engine.train_step(microbatches, PolicyLoss(config.objective), denominators, step=step, learning_rate=0.0)
            seconds[arm].append(time.process_time() - began)
        spent, again = quantising.read()
        seconds["quantising"].append(spent)
        if again:
            raise SystemExit(f"a step of {len(microbatches)} microbatches quantised {again} matrices more than once")
    found = {f"{arm}_s": median(of_arm[1:]) for arm, of_arm in seconds.items()}
    return {"tokens": num_tokens, "microbatches": len(microbatches), **found, "share": found["nvfp4_s"] / found["full_s"] - 1}


def wire_bytes(engines: dict, quantised: Selection) -> dict[str, float]:
    """Bytes of the quantised matrices in NVFP4, divided by those in bf16.

    Once of their tensors alone, and once of the buffers that are broadcast, with alignment and checksums.
    """
    modules = {name.rpartition(".")[0] for name in quantised.group_of}
    packed, plain = (
        [(name, tensor) for name, tensor in PolicySource(engines[arm]) if name.rpartition(".")[0] in modules]
        for arm in ("nvfp4", "full")
    )
    plain = [(name, tensor.to(torch.bfloat16)) for name, tensor in plain]
    (packed_bytes, packed_framed), (plain_bytes, plain_framed) = map(sent, (packed, plain))
    return {"wire_bytes_over_bf16": packed_bytes / plain_bytes, "framed_over_bf16": packed_framed / plain_framed}


def sent(tensors: list[tuple[str, Tensor]]) -> tuple[int, int]:
    """Bytes of the tensors, and of the buckets that the Gloo sender packs them into."""
    specs = [TensorSpec.of(name, tensor) for name, tensor in tensors]
    by_name, framed = dict(tensors), 0
    for bucket in plan_buckets(specs, BUCKET_BYTES):
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        pack_bucket(bucket, [by_name[spec.name] for spec in bucket.specs], buffer)
        framed += buffer.numel()
    return sum(tensor.numel() * tensor.element_size() for tensor in by_name.values()), framed


def measure(config: Config, tokens: list[int], repeats: int) -> dict:
    hf_config = config.model.architecture
    table = ParameterTable(hf_config)
    ratio = table.num_parameters / table.num_active_parameters
    if ratio > LARGEST_RATIO:
        raise SystemExit(
            f"the model has {ratio:.2f} times the weights that a token uses, more than {LARGEST_RATIO:g};"
            " choose a config with fewer experts"
        )
    with TemporaryDirectory() as folder:
        groups = start_process(config, 0, store=dist.FileStore(f"{folder}/store", 1))
        kernels.fake_quantise = Quantising()
        arms = {"full": {"training": "full", "rollouts": "full"}, "nvfp4": {"training": "qat", "rollouts": "nvfp4"}}
        engines = {
            arm: build_engine(
                Config.model_validate({**config.model_dump(), "precision": {**config.precision.model_dump(), **section}}),
                groups, hf_config, dict(random_hf_tensors(table, config.run.seed)),
            )
            for arm, section in arms.items()
        }  # fmt: skip
        selection = selection_of(engines["nvfp4"].config.precision, table)
        rows = [steps(engines, config, table, count, repeats) for count in sorted(tokens)]
        found = {
            "step_cost_share": rows[-1]["share"],
            **wire_bytes(engines, selection),
            "total_over_active": ratio,
            "steps": rows,
        }
        for engine in engines.values():
            engine.close()
        dist.destroy_process_group()
    return found


def show(found: dict) -> None:
    print(f"{'tokens':>8}{'microbatches':>14}{'full ms':>11}{'NVFP4 ms':>11}{'quantising ms':>15}{'cost':>8}")
    for row in found["steps"]:
        numbers = "".join(
            f"{1e3 * row[key]:{width}.1f}" for key, width in (("full_s", 11), ("nvfp4_s", 11), ("quantising_s", 15))
        )
        print(f"{row['tokens']:8}{row['microbatches']:14}{numbers}{row['share']:8.1%}")
    for key in ("total_over_active", "step_cost_share", "wire_bytes_over_bf16", "framed_over_bf16"):
        print(f"{key} = {found[key]:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEMO)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 32768], help="of a step")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each arm after one warm-up step")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments, overrides = parser.parse_known_args()
    one_rank = ["--layout.world_size", "1", "--layout.expert", "1", "--metrics.entropy_full_tokens", "0"]
    config = load_config(arguments.config, [*overrides, *one_rank])
    warnings.filterwarnings("ignore")  # Megatron's warnings of parts that a CPU lacks
    torch.manual_seed(0)
    found = measure(config, arguments.tokens, arguments.repeats)
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
