"""Input and candidates of the planner: a training step in plain numbers, and one layout to run it with."""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config import Config
from megatron_rl.topology import Layout

GIB = 1 << 30
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

PACKING_FILL = 0.95
"""Fraction of a microbatch that packed sequences fill: they are packed longest first, so that the last gaps are small."""
LENGTH_SPREAD = 1.25
"""E[L^2] / E[L]^2 of sequence lengths, for a standard deviation of half the mean. The cost of attention grows with the square."""


@dataclass(frozen=True)
class Workload:
    """One training step. Lengths in tokens."""

    longest_sequence: int
    mean_prompt: float
    mean_response: float
    num_sequences: int
    samples_per_prompt: int
    parameter_bytes: int = 2
    """Bytes of a weight and of an activation: 2 for bfloat16, 4 for float32."""
    optimizer: str = "adamw"
    muon_round_bytes: int = 512 << 20
    muon_in_fp32: bool = True
    """Whether the products of the Newton-Schulz iteration are in fp32."""
    rollout_weights: str = "bf16"
    """Precision of the servers' weights: fp32, bf16, fp8 or nvfp4."""
    keeps_packed_weights: bool = False
    """Whether the trainer keeps the servers' bytes beside their values, as products in FP4 need them."""
    scoring_passes: int = 1
    """Forward passes without gradient over the step's tokens, for the log-probs of the old policy and of the reference."""
    updates: int = 1
    """Optimizer steps among which the tokens are divided."""
    keeps_reference: bool = False
    truncated: bool = True
    """Whether tokens have keep-sets, from top-p or top-k. Otherwise every loss token needs its full row of logits, in chunks."""
    mean_keep_set: float = 8.0
    """Ids in the average keep-set, singletons not counted."""
    singletons: float = 0.45
    """Fraction of the loss tokens whose keep-set has one id; these cost nothing."""
    replays_routes: bool = True
    imbalance: float = 1.2
    """Tokens of the busiest rank's experts, divided by the mean."""
    unevenness: float = 0.05
    """Standard deviation of a microbatch's seconds, divided by their mean: packed sequences differ in length, and so does the
    time of attention."""
    max_staleness: int = 2
    max_num_seqs: int = 128
    bucket_bytes: int = 64 << 20

    @property
    def mean_tokens(self) -> float:
        """Tokens of the average sequence."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        """Tokens of the step."""
        return self.num_sequences * self.mean_tokens

    @property
    def loss_share(self) -> float:
        """Fraction of the tokens that carry a loss."""
        return self.mean_response / self.mean_tokens

    @property
    def most_in_flight(self) -> float:
        """Sequences that can be sampled at once without exceeding max_staleness at the step that consumes them."""
        return self.num_sequences * (1.0 + self.max_staleness)

    @property
    def attention_length(self) -> float:
        """Length of the sequence that the average token is in: long sequences have more tokens."""
        return self.mean_tokens * LENGTH_SPREAD


@dataclass(frozen=True)
class Candidate:
    """A layout of the trainer with its microbatches and recomputation."""

    layout: Layout
    microbatch_tokens: int
    """Packed tokens of a microbatch, over all context-parallel ranks."""
    recompute: Recompute
    sequence_parallel: bool = True
    """Has an effect only with tp > 1."""

    @property
    def sp(self) -> int:
        """Ranks that shard the residual stream, context parallelism not counted."""
        return self.layout.tp if self.sequence_parallel else 1

    def microbatches(self, work: Workload) -> int:
        """Microbatches of each data-parallel rank in one optimizer step; with vpp > 1 a multiple of pp."""
        tokens = work.tokens / work.updates
        count = max(1, -int(-tokens // (self.layout.dp * self.microbatch_tokens * PACKING_FILL)))
        multiple = self.layout.pp if self.layout.vpp > 1 else 1
        return -(-count // multiple) * multiple

    def mean_microbatch(self, work: Workload) -> float:
        """Tokens of the average microbatch."""
        return work.tokens / work.updates / (self.layout.dp * self.microbatches(work))

    def describe(self) -> str:
        """The sizes as --explain takes them, and the data-parallel size."""
        layout = self.layout
        sizes = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "CP": layout.cp, "EP": layout.ep, "ETP": layout.etp}
        return ", ".join(f"{name}={size}" for name, size in sizes.items()) + f", DP={layout.dp}"


def workload_of(
    config: Config,
    *,
    context: int | None = None,
    mean_prompt: float | None = None,
    mean_response: float | None = None,
    optimizer: str | None = None,
    rollout_weights: str | None = None,
    imbalance: float = 1.2,
) -> Workload:
    """The training step that a configuration describes.

    Mean lengths depend on the task and are unknown before a run. If they are not given, half of the longest prompt (at most 512
    tokens) and half of the longest response are assumed.

    Args:
        config: The run's configuration.
        context: Tokens of the longest sequence, instead of the configuration's, and more than its rollouts.max_new_tokens. What
            it has more than the configuration's is the longest response's, what it has less is the longest prompt's.
        mean_prompt: Tokens of the average prompt.
        mean_response: Tokens of the average response.
        optimizer: Name of the optimizer, instead of the configuration's.
        rollout_weights: Precision of the servers' weights, instead of the configuration's.
        imbalance: Tokens of the busiest rank's experts, divided by the mean.

    Returns:
        The training step.
    """
    longest = context or config.model.max_sequence_length
    room = config.rollouts.max_new_tokens + max(0, longest - config.model.max_sequence_length)
    rollouts, objective = config.rollouts, config.objective
    return Workload(
        longest_sequence=longest,
        mean_prompt=mean_prompt or max(1.0, min(512.0, (longest - room) / 2)),
        mean_response=mean_response or room / 2,
        num_sequences=config.rollouts_per_step,
        samples_per_prompt=rollouts.samples_per_prompt,
        parameter_bytes=4 if config.model.dtype == "float32" else 2,
        optimizer=optimizer or str(config.optimizer.name),
        muon_round_bytes=config.optimizer.muon.round_mib << 20,
        muon_in_fp32=config.optimizer.muon.newton_schulz_dtype == "float32",
        rollout_weights=rollout_weights or _weights_of_servers(config),
        keeps_packed_weights=config.precision.training == "native",
        scoring_passes=int(objective.old_policy == "recomputed") + int(objective.kl_coefficient > 0),
        updates=config.trainer.updates_per_step,
        keeps_reference=objective.kl_coefficient > 0,
        truncated=objective.keep_set_replay and (rollouts.top_p < 1 or rollouts.top_k > 0),
        mean_keep_set=min(8.0, rollouts.top_k or 8.0),
        replays_routes=objective.routing_replay,
        imbalance=imbalance,
        max_staleness=rollouts.max_staleness,
        max_num_seqs=config.servers.max_num_seqs,
        bucket_bytes=config.weight_sync.bucket_mib << 20,
    )


def _weights_of_servers(config: Config) -> str:
    if config.precision.rollouts == "nvfp4":
        return "nvfp4"
    return "fp32" if config.model.dtype == "float32" else "bf16"


def candidate_of(config: Config) -> Candidate:
    """The layout, microbatches and recomputation of a configuration."""
    trainer = config.trainer
    return Candidate(config.parallel_layout, trainer.max_tokens_per_microbatch, trainer.recompute, config.sequence_parallel)
