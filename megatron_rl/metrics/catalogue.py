"""Every metric that a run writes: its name, unit, meaning and reduction, and where it is shown.

The console's columns, the summary's rows, the report's plots and the metrics page of the documentation are made from this table.

A name may be a pattern. `{group}` and `{n}` are placeholders, and a part in brackets may be absent: `mismatch_kl_k1[/{group}]` is
`mismatch_kl_k1`, `mismatch_kl_k1/singleton`, `mismatch_kl_k1/staleness_2`, ...
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Source = Literal["row", "rollouts", "objective", "trainer", "probe", "weight sync", "ledger", "report"]
Reduced = Literal["mean", "sum", "max", "min", "last", "quantile"]
Statistic = Literal["ends", "mean", "max"]

SOURCES: dict[Source, str] = {
    "row": "Of every row",
    "rollouts": "The batch of a step, as the orchestrator knows it from the rollouts' summaries",
    "objective": "The loss, and the distributions of trainer and rollouts over the tokens of the batch",
    "trainer": "The trainer's step",
    "probe": "Probe rollouts: sampled directly after a weight update and scored by the trainer at the same weights",
    "weight sync": "The weight update before the step",
    "ledger": "The sample ledger: totals since the start of the run",
    "report": "Derived by the report",
}
"""Who measures it, to the heading of its table in the documentation."""

PLACEHOLDERS = {"group": r"singleton|sampled|staleness_\d+", "n": r"\d+"}


@dataclass(frozen=True)
class Column:
    """Of the console: a label, and the format of the value."""

    label: str
    form: str


@dataclass(frozen=True)
class SummaryRow:
    """Of summary.json and the table at a run's end."""

    key: str
    statistic: Statistic
    """ends: the means of the first and of the last steps, as two rows; mean: over the steps, weighted; max: of all steps."""
    meaning: str
    weight: str = ""
    """Of a mean: the name in the row that a step is weighted by (a row without it counts 1); '': every step counts 1."""


@dataclass(frozen=True)
class Panel:
    """One plot of the report."""

    title: str
    unit: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class Curve:
    """In a plot of the report: its panel's title, and the words of the legend."""

    panel: str
    legend: str


@dataclass(frozen=True)
class MetricSpec:
    """One metric, or one family of metrics.

    Example: `abs_dlogp_max` is the largest |log p_trainer - log p_rollout|, in nats, over all loss tokens of a step.
    """

    name: str
    """As in metrics.jsonl, TensorBoard and W&B; a pattern for a family."""
    unit: str
    """'' for a number without one."""
    meaning: str
    reduction: Reduced
    """How the values of tokens, rollouts, ranks and updates become the one of the step."""
    source: Source
    console: Column | None = None
    summary: SummaryRow | None = None
    report: Curve | None = None

    @property
    def plain_name(self) -> str:
        """The name of the family's first member: without what is in brackets."""
        return re.sub(r"\[.*?\]", "", self.name)

    @property
    def shown_in(self) -> tuple[str, ...]:
        """Places besides metrics.jsonl, TensorBoard and W&B, which hold all metrics."""
        places = {"console": self.console, "summary": self.summary, "report": self.report}
        return tuple(place for place, shown in places.items() if shown is not None)

    def covers(self, name: str) -> bool:
        """Whether `name` of a row is this metric or one of this family."""
        return self._pattern.fullmatch(name) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern = re.escape(self.name).replace(r"\[", "(?:").replace(r"\]", ")?")
        for placeholder, values in PLACEHOLDERS.items():
            pattern = pattern.replace(rf"\{{{placeholder}\}}", f"(?:{values})")
        return re.compile(pattern)


PANELS = (
    Panel("Reward"),
    Panel("Entropy", "nats"),
    Panel("Mismatch of trainer and rollouts (KL)", "nats"),
    Panel("|Δ log p|", logarithmic=True),
    Panel("|Δ log p| at equal weights (probes)", logarithmic=True),
    Panel("Ratio p_trainer / p_rollout"),
    Panel("Singletons"),
    Panel("Keep-set size", "ids", logarithmic=True),
    Panel("Staleness", "versions"),
    Panel("Gradient norm", logarithmic=True),
    Panel("Clipped and masked", "share of the tokens"),
    Panel("Tokens a second"),
    Panel("Waiting", "s a step"),
    Panel("Weight sync", "s"),
    Panel("Bytes of an update", "bytes"),
    Panel("Step", "s"),
    Panel("Ledger", "prompts"),
    Panel("Length of completions", "tokens"),
)
"""The report's plots in their order. The curves of a plot are in the order of the catalogue."""

# A row a metric, by subject: the formatter would give each argument its own line.
# fmt: off
CATALOGUE = (
    # ---- of every row
    MetricSpec("phase", "", "'train', or 'supervised' for a supervised start, which writes a row after every ten steps", "last",
               "row"),
    MetricSpec("step", "", "number of the step, from 0; in a supervised start the steps done", "last", "row"),
    MetricSpec("seconds", "s", "since the row before it, or since the start of the process", "last", "row"),
    MetricSpec("time", "s", "when the row was written, since the epoch", "last", "row"),

    # ---- reward and entropy
    MetricSpec("reward_mean", "reward", "mean reward", "mean", "rollouts", Column("reward", "{:.3f}"),
               SummaryRow("reward", "ends", "reward"), Curve("Reward", "mean")),
    MetricSpec("reward_std", "reward", "standard deviation of the rewards", "mean", "rollouts",
               report=Curve("Reward", "standard deviation")),
    MetricSpec("equal_reward_share", "share of groups",
               "groups whose rewards are all equal: their advantages are 0, they teach nothing", "mean", "rollouts"),
    MetricSpec("entropy_keep_set", "nats",
               "mean entropy of the trainer's distribution over the keep-set, of the loss tokens that have one", "mean",
               "objective", Column("entropy", "{:.3f}"), SummaryRow("entropy", "ends", "nats, over the keep-sets"),
               Curve("Entropy", "of the keep-sets")),
    MetricSpec("entropy_full", "nats",
               "mean entropy over the whole vocabulary, of metrics.entropy_full_tokens loss tokens of each microbatch", "mean",
               "objective", report=Curve("Entropy", "of the whole vocabulary")),

    # ---- the objective
    MetricSpec("loss", "", "the objective's value; of several updates in one step their mean", "sum", "objective"),
    MetricSpec("target_probability", "", "mean probability of a reference solution's token (supervised start)", "mean",
               "objective"),
    MetricSpec("mtp_loss_{n}", "nats", "mean cross-entropy of the n-th layer for multi-token prediction", "mean", "objective"),
    MetricSpec("kl_reference", "nats",
               "mean estimate (k3) of the KL divergence from the reference policy; with objective.kl_coefficient", "mean",
               "objective"),
    MetricSpec("clip_fraction", "share of loss tokens", "tokens whose ratio was clipped", "mean", "objective",
               report=Curve("Clipped and masked", "clipped")),
    MetricSpec("masked_fraction", "share of loss tokens",
               "tokens left out by the correction or by objective.off_policy_sequence_delta", "mean", "objective",
               report=Curve("Clipped and masked", "masked")),
    MetricSpec("correction_weight_mean", "", "mean importance weight of the correction", "mean", "objective"),
    MetricSpec("correction_weight_min", "", "smallest importance weight", "min", "objective"),
    MetricSpec("correction_weight_max", "", "largest importance weight", "max", "objective"),

    # ---- trainer against rollouts, on the training batch
    MetricSpec("mismatch_kl_k1[/{group}]", "nats",
               "mean of log p_rollout - log p_trainer, the k1 estimate of KL(rollouts || trainer): the alarm", "mean",
               "objective", Column("mismatch", "{:.1e}"),
               SummaryRow("train_mismatch_kl_k1", "mean", "training batches, some updates old", "num_loss_tokens"),
               Curve("Mismatch of trainer and rollouts (KL)", "k1")),
    MetricSpec("mismatch_kl_k3[/{group}]", "nats",
               "mean of r - 1 - log r with r = p_trainer / p_rollout, the k3 estimate: blind where the supports differ", "mean",
               "objective", report=Curve("Mismatch of trainer and rollouts (KL)", "k3")),
    MetricSpec("abs_dlogp_mean[/{group}]", "nats", "mean |log p_trainer - log p_rollout|", "mean", "objective",
               summary=SummaryRow("train_abs_dlogp_mean", "mean", "training batches", "num_loss_tokens"),
               report=Curve("|Δ log p|", "mean")),
    MetricSpec("abs_dlogp_max", "nats", "largest |log p_trainer - log p_rollout|", "max", "objective",
               report=Curve("|Δ log p|", "largest")),
    MetricSpec("ratio_mean[/{group}]", "", "mean of p_trainer / p_rollout", "mean", "objective",
               summary=SummaryRow("train_ratio_mean", "mean", "training batches", "num_loss_tokens"),
               report=Curve("Ratio p_trainer / p_rollout", "mean")),
    MetricSpec("ratio_p01", "", "1 % quantile of p_trainer / p_rollout", "quantile", "objective",
               report=Curve("Ratio p_trainer / p_rollout", "1 % quantile")),
    MetricSpec("ratio_p50", "", "median of p_trainer / p_rollout", "quantile", "objective",
               report=Curve("Ratio p_trainer / p_rollout", "median")),
    MetricSpec("ratio_p99", "", "99 % quantile of p_trainer / p_rollout", "quantile", "objective",
               report=Curve("Ratio p_trainer / p_rollout", "99 % quantile")),
    MetricSpec("ratio_off_share[/{group}]", "share of loss tokens",
               "tokens whose ratio p_trainer / p_rollout is more than 0.1 away from 1", "mean", "objective",
               report=Curve("Clipped and masked", "ratio far from 1")),

    # ---- trainer against rollouts, on probes
    MetricSpec("probe/num_loss_tokens", "tokens", "loss tokens of the probe", "sum", "probe"),
    MetricSpec("probe/mismatch_kl_k1[/{group}]", "nats", "as mismatch_kl_k1", "mean", "probe"),
    MetricSpec("probe/mismatch_kl_k3[/{group}]", "nats", "as mismatch_kl_k3", "mean", "probe"),
    MetricSpec("probe/abs_dlogp_mean[/{group}]", "nats", "as abs_dlogp_mean: what is left at the same weights is arithmetic",
               "mean", "probe",
               summary=SummaryRow("abs_dlogp_mean", "mean", "probes, at equal weights: |Δ log p|", "probe/num_loss_tokens"),
               report=Curve("|Δ log p| at equal weights (probes)", "mean")),
    MetricSpec("probe/abs_dlogp_max", "nats", "as abs_dlogp_max", "max", "probe",
               summary=SummaryRow("abs_dlogp_max", "max", "probes, at equal weights"),
               report=Curve("|Δ log p| at equal weights (probes)", "largest")),
    MetricSpec("probe/ratio_mean[/{group}]", "", "as ratio_mean", "mean", "probe",
               summary=SummaryRow("ratio_mean", "mean", "probes, at equal weights", "probe/num_loss_tokens")),
    MetricSpec("probe/ratio_off_share[/{group}]", "share of loss tokens", "as ratio_off_share", "mean", "probe"),

    # ---- staleness, keep-sets and routes of the batch
    MetricSpec("staleness_mean", "versions", "mean age of the rollouts; a rollout is as old as its oldest token", "mean",
               "rollouts", Column("staleness", "{:.2f}"),
               SummaryRow("staleness_mean", "mean", "weight updates between sampling and training", "num_rollouts"),
               Curve("Staleness", "mean")),
    MetricSpec("staleness_max", "versions", "age of the oldest rollout", "max", "rollouts",
               summary=SummaryRow("staleness_max", "max", "the oldest rollout of the run"), report=Curve("Staleness", "largest")),
    MetricSpec("token_staleness_mean", "versions", "mean age of the loss tokens", "mean", "objective"),
    MetricSpec("token_staleness_max", "versions", "age of the oldest loss token", "max", "objective"),
    MetricSpec("singleton_share", "share of loss tokens",
               "tokens whose recorded keep-set has one id; they cost the output layer nothing", "mean", "objective",
               Column("singletons", "{:.0%}"),
               SummaryRow("singleton_share", "mean", "share of the trained tokens whose keep-set has one id", "num_loss_tokens"),
               Curve("Singletons", "share of the trained tokens")),
    MetricSpec("num_singletons", "tokens", "loss tokens whose recorded keep-set has one id", "sum", "rollouts"),
    MetricSpec("keep_set_coverage", "share of loss tokens", "tokens that came with a keep-set", "mean", "rollouts",
               summary=SummaryRow("keep_set_coverage", "mean", "share of the trained tokens with a keep-set", "num_loss_tokens")),
    MetricSpec("keep_set_size_mean", "ids", "mean size of the keep-sets", "mean", "rollouts",
               report=Curve("Keep-set size", "mean")),
    MetricSpec("keep_set_size_p50", "ids", "median size of the replayed keep-sets", "quantile", "trainer",
               report=Curve("Keep-set size", "median")),
    MetricSpec("keep_set_size_p99", "ids", "99 % quantile of their sizes", "quantile", "trainer",
               report=Curve("Keep-set size", "99 % quantile")),
    MetricSpec("keep_set_size_max", "ids", "size of the widest", "max", "trainer", report=Curve("Keep-set size", "largest")),
    MetricSpec("routing_coverage", "share of tokens",
               "tokens whose experts were recorded; a sequence's last token is never routed, and not counted", "mean", "rollouts",
               summary=SummaryRow("routing_coverage", "mean", "share of the tokens with routes", "num_tokens")),

    # ---- size of the batch
    MetricSpec("num_groups", "groups", "groups of the batch: one a prompt", "sum", "rollouts"),
    MetricSpec("num_rollouts", "rollouts", "rollouts of the batch", "sum", "rollouts"),
    MetricSpec("num_tokens", "tokens", "tokens of the batch, prompts included", "sum", "rollouts"),
    MetricSpec("num_loss_tokens", "tokens", "tokens of the batch that carry a loss", "sum", "rollouts"),
    MetricSpec("completion_tokens_mean", "tokens", "mean length of the completions", "mean", "rollouts",
               report=Curve("Length of completions", "trained, mean")),
    MetricSpec("completion_tokens_max", "tokens", "length of the longest completion", "max", "rollouts",
               report=Curve("Length of completions", "trained, longest")),
    MetricSpec("cut_off_share", "share of rollouts", "rollouts that reached their longest length before they ended", "mean",
               "rollouts"),

    # ---- the optimizer
    MetricSpec("grad_norm", "", "norm of the gradient before clipping; of the step's last update", "last", "trainer",
               report=Curve("Gradient norm", "before clipping")),
    MetricSpec("learning_rate", "", "learning rate of the step", "last", "trainer"),
    MetricSpec("max_attention_logit", "", "largest attention logit of any head; with optimizer.muon.qk_clip", "max", "trainer"),

    # ---- speed
    MetricSpec("trainer_tokens_per_s", "tokens/s", "num_tokens / step_s", "last", "trainer", Column("trainer tok/s", "{:.0f}"),
               SummaryRow("trainer_tokens_per_s", "mean", "while the trainer works", "step_s"),
               Curve("Tokens a second", "trainer, while it trains")),
    MetricSpec("rollout_tokens_per_s", "tokens/s",
               "completion tokens that finished since the step before, over the time since then", "last", "rollouts",
               Column("rollout tok/s", "{:.0f}"),
               SummaryRow("rollout_tokens_per_s", "mean", "sampled, over the whole time", "seconds"),
               Curve("Tokens a second", "rollouts")),
    MetricSpec("overhead_share", "share of the work",
               "assemble_s + own_s + fingerprint_s, of these and forward_backward_s, optimizer_s and score_s", "last", "trainer",
               summary=SummaryRow("overhead_share", "mean", "of a step: neither Megatron, optimizer nor waiting", "step_s")),
    MetricSpec("step_s", "s", "the trainer's step, on rank 0, from the step plan to the last checksum", "last", "trainer",
               report=Curve("Step", "trainer's step")),
    MetricSpec("assemble_s", "s", "rank 0 reads, checks, packs and collates its microbatches", "last", "trainer"),
    MetricSpec("score_s", "s", "forward passes before the first update: the old policy's and the reference's log-probs", "last",
               "trainer"),
    MetricSpec("forward_backward_s", "s", "Megatron's passes and gradient reductions, of the slowest rank; updates add up", "max",
               "trainer", report=Curve("Step", "forward and backward")),
    MetricSpec("optimizer_s", "s", "the optimizer, of the slowest rank; updates add up", "max", "trainer",
               report=Curve("Step", "optimizer")),
    MetricSpec("own_s", "s", "replay, loss and metrics, of the slowest rank, and rank 0's quantiles and scores; updates add up",
               "max", "trainer"),
    MetricSpec("fingerprint_s", "s", "checksums of rank 0's part of the state", "last", "trainer"),
    MetricSpec("trainer_waits_s", "s",
               "time between two steps without training or weight update: the trainer waited for rollouts or a checkpoint",
               "last", "report", report=Curve("Waiting", "trainer, for rollouts")),

    # ---- weight sync
    MetricSpec("sync_pause_s", "s", "until all servers were paused", "last", "weight sync",
               report=Curve("Waiting", "servers, paused for an update")),
    MetricSpec("sync_s", "s", "the update: pause, transfer and resume", "last", "weight sync",
               report=Curve("Weight sync", "in all")),
    MetricSpec("sync_transfer_s", "s", "transfer of the weights", "last", "weight sync", report=Curve("Weight sync", "transfer")),
    MetricSpec("sync_bytes", "bytes", "sent to each server", "last", "weight sync",
               summary=SummaryRow("sync_bytes", "max", "of one weight update to one server"),
               report=Curve("Bytes of an update", "to each server")),

    # ---- the sample ledger
    MetricSpec("ledger/drawn", "prompts", "drawn from the task", "last", "ledger", report=Curve("Ledger", "drawn")),
    MetricSpec("ledger/trained", "prompts", "trained", "last", "ledger", report=Curve("Ledger", "trained")),
    MetricSpec("ledger/in_flight", "prompts", "waiting, being sampled, buffered or planned", "last", "ledger",
               report=Curve("Ledger", "in flight")),
    MetricSpec("ledger/dropped", "prompts", "dropped, for a reason that the ledger holds", "last", "ledger",
               report=Curve("Ledger", "dropped")),
    MetricSpec("ledger/discarded_draws", "draws", "draws that were discarded, whether or not their prompt was sampled again",
               "last", "ledger"),
    MetricSpec("ledger/kept_length_mean", "tokens", "mean length of the trained completions", "last", "ledger"),
    MetricSpec("ledger/discarded_length_mean", "tokens", "mean length of the discarded completions", "last", "ledger",
               report=Curve("Length of completions", "discarded, mean")),
)
# fmt: on
"""The order is that of the console, of the summary within each statistic, and of the curves within a plot."""


def unknown_names(names: Iterable[str]) -> list[str]:
    """Those that the catalogue lacks: a test holds the names of a run against it."""
    return [name for name in names if not any(spec.covers(name) for spec in CATALOGUE)]


def curves_of(panel: Panel) -> dict[str, str]:
    """Name in the rows to the words of the legend."""
    return {
        spec.plain_name: spec.report.legend for spec in CATALOGUE if spec.report is not None and spec.report.panel == panel.title
    }


def documented() -> dict[str, list[tuple[str, str, str, str, str]]]:
    """The catalogue as tables for the documentation.

    Returns:
        Heading of a source to its rows: name, unit, meaning, reduction, places where it is shown.
    """
    return {
        heading: [
            (spec.name, spec.unit, spec.meaning, spec.reduction, ", ".join(spec.shown_in))
            for spec in CATALOGUE
            if spec.source == source
        ]
        for source, heading in SOURCES.items()
    }
