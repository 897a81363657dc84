"""What is planned for, and what is chosen: a step of a run in plain numbers, and one way to lay it out."""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config import Config
from megatron_rl.topology import Layout

GIB = 1 << 30
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

PACKING_FILL = 0.95
"""Share of a microbatch that packed sequences fill: they are placed longest first, and what is left over at the end is short."""
LENGTH_SPREAD = 1.25
"""E[L^2] / E[L]^2 of sequence lengths: a standard deviation of half the mean. Attention grows with the square."""


@dataclass(frozen=True)
class Workload:
    """One training step. Lengths in tokens."""

    longest_sequence: int
    mean_prompt: float
    mean_response: float
    num_sequences: int
    samples_per_prompt: int
    parameter_bytes: int = 2
    """Of a weight and an activation: 2 for bfloat16, 4 for float32."""
    optimizer: str = "adamw"
    muon_round_bytes: int = 512 << 20
    muon_in_fp32: bool = True
    """The Newton-Schulz iteration's products."""
    rollout_weights: str = "bf16"
    """Or fp8, nvfp4: what the servers hold."""
    scoring_passes: int = 1
    """Passes without gradient over the step's tokens: the old policy's log-probs, the reference's."""
    updates: int = 1
    """Optimizer steps that the tokens are split into."""
    keeps_reference: bool = False
    truncated: bool = True
    """Top-p or top-k: tokens have keep-sets. Otherwise every loss token needs its whole row of logits, in chunks."""
    mean_keep_set: float = 8.0
    """Of the tokens that are computed at all."""
    singletons: float = 0.45
    """Share of the loss tokens whose keep-set has one element, and costs nothing."""
    replays_routes: bool = True
    imbalance: float = 1.2
    """Tokens of the busiest rank's experts over the mean."""
    unevenness: float = 0.05
    """Standard deviation of one microbatch's seconds over their mean: packed sequences differ in length, and attention with
    them."""
    max_staleness: int = 2
    max_num_seqs: int = 128
    bucket_bytes: int = 64 << 20

    @property
    def mean_tokens(self) -> float:
        """Tokens of the average sequence."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        """Of the whole step."""
        return self.num_sequences * self.mean_tokens

    @property
    def loss_share(self) -> float:
        """Fraction of the tokens that carry a loss."""
        return self.mean_response / self.mean_tokens

    @property
    def most_in_flight(self) -> float:
        """Sequences that may be sampled at once, without becoming too old for the step that consumes them."""
        return self.num_sequences * (1.0 + self.max_staleness)

    @property
    def attention_length(self) -> float:
        """Length of the sequence that the average token stands in: long sequences have more tokens."""
        return self.mean_tokens * LENGTH_SPREAD


@dataclass(frozen=True)
class Candidate:
    """One way to run the trainer."""

    layout: Layout
    microbatch_tokens: int
    """Packed tokens of a microbatch, over all context-parallel ranks."""
    recompute: Recompute
    sequence_parallel: bool = True
    """Counts with tp > 1 only."""

    @property
    def sp(self) -> int:
        """Ranks that the residual stream is cut over, beside context parallelism."""
        return self.layout.tp if self.sequence_parallel else 1

    def microbatches(self, work: Workload) -> int:
        """Of each data-parallel rank and optimizer step."""
        tokens = work.tokens / work.updates
        count = max(1, -int(-tokens // (self.layout.dp * self.microbatch_tokens * PACKING_FILL)))
        multiple = self.layout.pp if self.layout.vpp > 1 else 1
        return -(-count // multiple) * multiple

    def mean_microbatch(self, work: Workload) -> float:
        """Tokens that a microbatch holds on average."""
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
    """Of a run's configuration.

    Context: the longest sequence, in place of the configuration's; the longest response grows with it.

    mean_prompt, mean_response: of the task; unknown before a run, so that half of the room is assumed where they are not given.
    """
    longest = context or config.model.max_sequence_length
    room = max(1, longest - (config.model.max_sequence_length - config.rollouts.max_new_tokens))
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
    """The layout that a configuration names."""
    trainer = config.trainer
    return Candidate(config.parallel_layout, trainer.max_tokens_per_microbatch, trainer.recompute, config.sequence_parallel)
