"""Time and memory of the keep-set log-softmax, forward and backward, compared with two dense ways to compute the same numbers.

    python scripts/bench_keep_set.py [--json FILE] [--full] [--quick] [--sets ...] [--clock wall|cpu]
        [--device cpu|cuda] [--dtype fp32|bf16]

Arms, each in a separate process, so that its peak memory is measured alone:

  keep_set        this project's operation, the weight's gradient added to main_grad
  keep_set_dense  the same, a dense weight gradient returned
  dense_masked    all logits [T, V] at once, those outside the sets masked, log-softmax in place: what Megatron-based trainers do
  chunked         logits in vocabulary chunks, kept ones picked into a padded [T, K] table: no [T, V], but all its arithmetic

The dense arms add their weight gradient to main_grad in place, with as few reads and writes as possible. All arms get the same
inputs, and the script stops if their log-probs differ. The floor is the time to move the kept rows once and their gradients once
(per token and kept id, singletons excepted), at the bandwidth of a large copy.

On a shared machine, wall-clock times include the load of others: `OMP_NUM_THREADS=1 ... --clock cpu` measures the CPU time of
this process.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from megatron_rl.keep_set import KeepSets, TokenKind, keep_set_log_probs

ARMS = ("keep_set", "keep_set_dense", "dense_masked", "chunked")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TEMPERATURE = 0.8
CHUNK_ROWS = 4096
SETS = ("published", "no_singletons", "all_512", "all_flat", "untruncated")


@dataclass(frozen=True)
class Problem:
    """One set of inputs. sets: of SETS; all_flat is 97 % of the vocabulary, untruncated no sets at all."""

    sets: str
    num_tokens: int
    vocab_size: int
    hidden_size: int


def problems(quick: bool, full: bool, sets: list[str]) -> list[Problem]:
    """The headline is the last published one. Flat sets are as large as the logits, so they get fewer tokens."""
    if quick:
        chosen = [Problem(name, 32, 700, 16) for name in SETS]
    else:
        shapes = [(vocab, width) for width in ((4096, 1024) if full else (1024,)) for vocab in (32768, 151936)]
        chosen = [Problem("published", 2048, *shape) for shape in shapes]
        chosen += [Problem(name, 256 if name == "all_flat" else 2048, 151936, 1024) for name in SETS if name != "published"]
    return [problem for problem in chosen if problem.sets in sets]


# ---------- inputs


def set_sizes(problem: Problem) -> Tensor:
    """int64 [T] in random order.

    Published shape: 48 % singletons, the rest log-normal, so that the mean is 8, the median 2 and the 99th percentile 82.
    """
    num_tokens, vocab_size = problem.num_tokens, problem.vocab_size
    fixed = {"all_512": 512, "all_flat": int(0.97 * vocab_size), "untruncated": 0}
    if problem.sets in fixed:
        return torch.full((num_tokens,), fixed[problem.sets])
    num_singletons = int(0.48 * num_tokens) if problem.sets == "published" else 0
    quantiles = (torch.arange(num_tokens - num_singletons, dtype=torch.float64) + 0.5) / (num_tokens - num_singletons)
    several = (2.05 + 1.148 * torch.special.ndtri(quantiles)).exp().round().clamp(2, 512)
    return torch.cat([torch.ones(num_singletons), several]).long()[torch.randperm(num_tokens)]


def make_inputs(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Samples the ids of each set without repetition from a Zipf distribution whose ranks are spread over the vocabulary."""
    torch.manual_seed(0)
    num_tokens, vocab_size, width = problem.num_tokens, problem.vocab_size, problem.hidden_size
    sizes = set_sizes(problem)
    frequency = (1.0 / torch.arange(1, vocab_size + 1))[torch.randperm(vocab_size)]
    kept = [_sample_ids(frequency, size, problem.sets == "all_flat") for size in sizes.tolist()]
    targets = torch.stack([ids[0] if len(ids) else torch.randint(vocab_size, ()) for ids in kept])
    return {
        "hidden": torch.randn(num_tokens, width).to(dtype),
        "weight": (torch.randn(vocab_size, width) / width**0.5).to(dtype),
        "upstream": torch.randn(num_tokens),
        "target_ids": targets,
        "keep_ids": torch.cat(kept).int(),
        "keep_offsets": torch.nn.functional.pad(sizes.cumsum(0), (1, 0)),
    }


def _sample_ids(frequency: Tensor, size: int, flat: bool) -> Tensor:
    """int64 [size], distinct ids in random order."""
    if size == 0 or flat:
        return torch.randperm(len(frequency))[:size]
    return torch.multinomial(frequency, size)


# ---------- arms


def run_keep_set(inputs: dict[str, Tensor]) -> Tensor:
    sizes = inputs["keep_offsets"].diff()
    kinds = torch.where(sizes > 0, TokenKind.KEEP_SET, TokenKind.FULL).to(torch.uint8)
    sets = KeepSets(inputs["target_ids"], kinds, inputs["keep_ids"], inputs["keep_offsets"])
    weight = inputs["weight"]
    out = keep_set_log_probs(inputs["hidden"], weight, sets, temperature=TEMPERATURE, vocab_size=len(weight), needs_entropy=False)
    (out.log_probs * inputs["upstream"]).sum().backward()
    return out.log_probs.detach()


def run_dense_masked(inputs: dict[str, Tensor]) -> Tensor:
    """Forward keeps one [T, V] tensor, the probabilities; backward turns it into the gradient of the logits in place."""
    hidden, weight, targets = (inputs[name].detach() for name in ("hidden", "weight", "target_ids"))
    sizes, tokens = inputs["keep_offsets"].diff(), torch.arange(len(hidden), device=hidden.device)
    logits = (hidden @ weight.t()).float().div_(TEMPERATURE)
    if inputs["keep_ids"].numel():
        excluded = torch.ones(logits.shape, dtype=torch.bool, device=hidden.device)
        excluded[torch.repeat_interleave(tokens, sizes), inputs["keep_ids"]] = False
        logits.masked_fill_(excluded, float("-inf"))
        del excluded
    logits.sub_(logits.amax(1, keepdim=True))
    of_targets = logits[tokens, targets]
    probabilities = logits.exp_()
    total = probabilities.sum(1, keepdim=True)
    log_probs = of_targets - total.squeeze(1).log()

    d_logits = probabilities.mul_(-inputs["upstream"][:, None] / total)
    d_logits[tokens, targets] += inputs["upstream"]
    d_logits = d_logits.div_(TEMPERATURE).to(weight.dtype)
    inputs["hidden"].grad = d_logits @ weight
    add_product(inputs["weight"].main_grad, d_logits, hidden)
    return log_probs


def run_chunked(inputs: dict[str, Tensor]) -> Tensor:
    return _chunked_sets(inputs) if inputs["keep_ids"].numel() else _chunked_untruncated(inputs)


def _chunked_sets(inputs: dict[str, Tensor]) -> Tensor:
    """Each chunk's logits once forward; backward scatters the kept ones' gradients into a dense chunk."""
    hidden, weight, upstream = (inputs[name].detach() for name in ("hidden", "weight", "upstream"))
    sizes = inputs["keep_offsets"].diff()
    place = torch.arange(int(sizes.max()), device=hidden.device)
    is_kept = place < sizes[:, None]  # [T, K]
    ids = torch.zeros(is_kept.shape, dtype=torch.int64, device=hidden.device)
    ids[is_kept] = inputs["keep_ids"].long()
    kept = torch.full(is_kept.shape, float("-inf"), device=hidden.device)
    for first in range(0, len(weight), CHUNK_ROWS):
        logits = (hidden @ weight[first : first + CHUNK_ROWS].t()).float()
        here = is_kept & (ids >= first) & (ids < first + logits.shape[1])
        kept = torch.where(here, logits.gather(1, (ids - first).clamp(0, logits.shape[1] - 1)), kept)
    log_p = kept.div_(TEMPERATURE).log_softmax(1)
    is_target = is_kept & (ids == inputs["target_ids"][:, None])
    log_probs = log_p.masked_fill(~is_target, 0).sum(1)

    d_kept = (is_target.float() - log_p.exp()).mul_(upstream[:, None] / TEMPERATURE)
    d_hidden = torch.zeros(hidden.shape, device=hidden.device)
    for first in range(0, len(weight), CHUNK_ROWS):
        rows = weight[first : first + CHUNK_ROWS]
        here = is_kept & (ids >= first) & (ids < first + len(rows))
        d_logits = torch.zeros(len(hidden), len(rows), device=hidden.device)
        d_logits.scatter_add_(1, (ids - first).clamp(0, len(rows) - 1), torch.where(here, d_kept, 0.0))
        d_logits = d_logits.to(weight.dtype)
        d_hidden += d_logits @ rows
        add_product(inputs["weight"].main_grad[first : first + CHUNK_ROWS], d_logits, hidden)
    inputs["hidden"].grad = d_hidden.to(hidden.dtype)
    return log_probs


def _chunked_untruncated(inputs: dict[str, Tensor]) -> Tensor:
    """The usual fused linear cross-entropy: a running maximum and sum forward, the logits again backward."""
    hidden, weight, targets, upstream = (inputs[name].detach() for name in ("hidden", "weight", "target_ids", "upstream"))
    maximum, total = (
        torch.full((len(hidden), 1), float("-inf"), device=hidden.device),
        torch.zeros(len(hidden), 1, device=hidden.device),
    )
    for first in range(0, len(weight), CHUNK_ROWS):
        logits = (hidden @ weight[first : first + CHUNK_ROWS].t()).float().div_(TEMPERATURE)
        higher = torch.maximum(maximum, logits.amax(1, keepdim=True))
        total = total * (maximum - higher).exp() + logits.sub_(higher).exp_().sum(1, keepdim=True)
        maximum = higher
    log_z = maximum + total.log()
    log_probs = (hidden * weight[targets]).float().sum(1).div_(TEMPERATURE) - log_z.squeeze(1)

    d_hidden = torch.zeros(hidden.shape, device=hidden.device)
    for first in range(0, len(weight), CHUNK_ROWS):
        rows = weight[first : first + CHUNK_ROWS]
        d_logits = (hidden @ rows.t()).float().div_(TEMPERATURE).sub_(log_z).exp_().mul_(-upstream[:, None])
        here = ((targets >= first) & (targets < first + len(rows))).nonzero().squeeze(1)
        d_logits[here, targets[here] - first] += upstream[here]
        d_logits = d_logits.div_(TEMPERATURE).to(weight.dtype)
        d_hidden += d_logits @ rows
        add_product(inputs["weight"].main_grad[first : first + CHUNK_ROWS], d_logits, hidden)
    inputs["hidden"].grad = d_hidden.to(hidden.dtype)
    return log_probs


def add_product(main_grad: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """main_grad (fp32) += d_logits^T hidden."""
    if d_logits.dtype == main_grad.dtype:
        main_grad.addmm_(d_logits.t(), hidden)
    else:
        main_grad += d_logits.t() @ hidden


RUN: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "keep_set": run_keep_set, "keep_set_dense": run_keep_set, "dense_masked": run_dense_masked, "chunked": run_chunked,
}  # fmt: skip


# ---------- measurement


def measure_arm(arm: str, path: str, device: str, clock: str, repeats: int) -> dict:
    """Measure one arm in this process.

    Returns:
        Seconds of each repetition, peak bytes above the inputs, and what is needed to compare the arms.
    """
    inputs = {name: tensor.to(device) for name, tensor in torch.load(path).items()}
    inputs["hidden"].requires_grad_()
    inputs["weight"] = torch.nn.Parameter(inputs["weight"])
    if arm != "keep_set_dense":
        inputs["weight"].main_grad = torch.zeros(inputs["weight"].shape, device=device)
    seconds, peak = [], PeakMemory(device)
    for _ in range(repeats + 1):
        inputs["hidden"].grad = inputs["weight"].grad = None
        start = now(device, clock)
        log_probs = RUN[arm](inputs)
        seconds.append(now(device, clock) - start)
        peak.stop_after_first()
    d_weight = inputs["weight"].grad if arm == "keep_set_dense" else inputs["weight"].main_grad / (repeats + 1)
    return {
        "seconds": seconds[1:] or seconds,
        "peak_bytes": peak.bytes,
        "log_probs": log_probs.float().cpu().tolist(),
        "norms": [float(inputs["hidden"].grad.float().norm()), float(d_weight.float().norm())],
    }


class PeakMemory:
    """Peak bytes above what was in use at construction, over the first repetition."""

    def __init__(self, device: str):
        self.device, self.bytes = device, None
        if device == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is in use now
            self.before = self._status("VmRSS")
        else:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def stop_after_first(self) -> None:
        if self.bytes is None:
            peak = self._status("VmHWM") if self.device == "cpu" else torch.cuda.max_memory_allocated()
            self.bytes = peak - self.before

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def now(device: str, clock: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() if clock == "wall" else time.process_time()


def copy_bandwidth(device: str, clock: str) -> float:
    """Bytes read plus bytes written per second of the best of several copies of 256 MiB."""
    source = torch.ones(64 << 20, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        start = now(device, clock)
        target.copy_(source)
        seconds.append(now(device, clock) - start)
    return 2 * source.numel() * source.element_size() / min(seconds)


def floor_seconds(inputs: dict[str, Tensor], bandwidth: float) -> float:
    """Kept rows once in, their gradients once out, for every (token, kept id) pair of a set with more than one id."""
    sizes = inputs["keep_offsets"].diff()
    num_pairs = int(sizes[sizes > 1].sum())
    return num_pairs * inputs["weight"].shape[1] * (inputs["weight"].element_size() + 4) / bandwidth


def run_problem(problem: Problem, arguments: argparse.Namespace, bandwidth: float) -> dict:
    """One row of the table: median seconds and peak bytes of each arm, and the floor."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/inputs.pt"
        inputs = make_inputs(problem, DTYPES[arguments.dtype])
        torch.save(inputs, path)
        row = {**asdict(problem), **describe(inputs), "floor_seconds": floor_seconds(inputs, bandwidth), "arms": {}}
        del inputs
        measured = {
            arm: _in_separate_process(arm, path, arguments)
            for arm in ARMS
            if problem.sets == "published" or arm != "dense_masked"
        }
    _check_that_arms_agree(measured, 1e-3 if arguments.dtype == "fp32" else 0.1)
    for arm, result in measured.items():
        row["arms"][arm] = {"seconds": median(result["seconds"]), "peak_bytes": result["peak_bytes"]}
    return row


def _in_separate_process(arm: str, path: str, arguments: argparse.Namespace) -> dict:
    """Forked from a process that has imported torch and has done nothing else: it has neither this one's memory nor CUDA."""
    repeats = arguments.repeats if arm in ("dense_masked", "chunked") else 5 * arguments.repeats
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_rl.keep_set"])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(measure_arm, arm, path, arguments.device, arguments.clock, repeats).result()
        except BrokenProcessPool as error:
            raise SystemExit(f"the process of arm {arm} was killed; out of memory?") from error


def _check_that_arms_agree(measured: dict[str, dict], tolerance: float) -> None:
    wanted = measured["chunked"]
    for arm, result in measured.items():
        difference = (torch.tensor(result["log_probs"]) - torch.tensor(wanted["log_probs"])).abs().max()
        norms = [abs(a / b - 1) for a, b in zip(result["norms"], wanted["norms"], strict=True)]
        if not (difference < tolerance and max(norms) < tolerance):
            raise SystemExit(f"{arm} differs from chunked: log-probs by {difference}, gradient norms by {norms}")


def describe(inputs: dict[str, Tensor]) -> dict:
    sizes = inputs["keep_offsets"].diff().float()
    return {
        "singletons": float((sizes == 1).float().mean()), "mean": float(sizes.mean()),
        "median": float(sizes.median()), "p99": float(sizes.quantile(0.99)),
    }  # fmt: skip


# ---------- report


def headline(rows: list[dict]) -> dict:
    """The ratios of the last published row, and the worst ratio of the adversarial rows, as far as they were run."""
    ratios, published, adversarial = (
        {},
        [row for row in rows if row["sets"] == "published"],
        [row for row in rows if row["sets"] != "published"],
    )
    if adversarial:
        ratios["adversarial_worst_over_chunked"] = max(over_chunked(row) for row in adversarial)
    if not published:
        return ratios
    arms, own = published[-1]["arms"], published[-1]["arms"]["keep_set"]
    ratio = {"speedup_dense_masked": ("dense_masked", "keep_set"), "speedup_chunked": ("chunked", "keep_set")}
    ratio |= {f"{name}_dense_gradient": (other, "keep_set_dense") for name, (other, _) in ratio.items()}
    return {
        **{name: arms[other]["seconds"] / arms[mine]["seconds"] for name, (other, mine) in ratio.items()},
        "memory_over_dense_masked": own["peak_bytes"] / arms["dense_masked"]["peak_bytes"],
        "time_over_floor": own["seconds"] / published[-1]["floor_seconds"],
        **ratios,
    }


def over_chunked(row: dict) -> float:
    return row["arms"]["keep_set"]["seconds"] / row["arms"]["chunked"]["seconds"]


def print_row(row: dict) -> None:
    shape = f"T={row['num_tokens']} V={row['vocab_size']} H={row['hidden_size']}"
    sets = f"singletons {row['singletons']:.0%}, mean {row['mean']:.1f}, median {row['median']:.0f}, p99 {row['p99']:.0f}"
    print(f"\n{row['sets']}: {shape}; {sets}; floor {row['floor_seconds'] * 1e3:.1f} ms", flush=True)
    for arm, result in row["arms"].items():
        ratio = result["seconds"] / row["arms"]["keep_set"]["seconds"]
        print(
            f"  {arm:15s} {result['seconds'] * 1e3:10.1f} ms {result['peak_bytes'] / 1e6:9.1f} MB {ratio:9.2f} x keep_set",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the table and the ratios to this file")
    parser.add_argument("--full", action="store_true", help="H = 4096 too; takes minutes in the dense arms")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, to try the script")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="only these")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: CPU time of this process, all threads")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="runs of the dense arms after one warm-up run (0: measure that run); the other arms run five times as often",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    bandwidth = copy_bandwidth(arguments.device, arguments.clock)
    threads = f"{torch.get_num_threads()} thread(s), " if arguments.device == "cpu" else ""
    print(
        f"{arguments.device}, {arguments.dtype}, {threads}{arguments.clock} clock, "
        f"copies {bandwidth / 1e9:.1f} GB/s (read + write)"
    )
    rows = []
    for problem in problems(arguments.quick, arguments.full, arguments.sets):
        rows.append(run_problem(problem, arguments, bandwidth))
        print_row(rows[-1])
    ratios = headline(rows)
    print("\n" + "\n".join(f"{name} = {value:.3g}" for name, value in ratios.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({**ratios, "copy_bandwidth": bandwidth, "table": rows}, indent=1))


if __name__ == "__main__":
    main()
