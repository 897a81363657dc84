"""The complete configuration of a run, and the rules that hold between its sections."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_rl.config.sampling import Sampling
from megatron_rl.config.sections import (
    Checkpoint,
    LayoutSection,
    Metrics,
    Model,
    Objective,
    Optimizer,
    Precision,
    Rollouts,
    Run,
    Section,
    Servers,
    Slurm,
    Supervised,
    Task,
    Trainer,
    WeightSync,
)  # fmt: skip
from megatron_rl.topology import Layout

LAST_PORT = 65535


def changes_fp4(variable: str) -> bool:
    """Whether an environment variable changes how Transformer Engine quantises to FP4."""
    return variable in ("NVTE_USE_FAST_MATH", "NVTE_BACKWARD_OVERRIDE") or variable.startswith("NVTE_NVFP4_")


class Config(Section):
    """The configuration of a run: one table of the TOML file for each field.

    The rules between sections are checked at construction.
    """

    run: Run
    model: Model
    task: Task
    rollouts: Rollouts = Rollouts()
    servers: Servers = Servers()
    layout: LayoutSection = LayoutSection()
    trainer: Trainer = Trainer()
    optimizer: Optimizer = Optimizer()
    objective: Objective = Objective()
    supervised: Supervised = Supervised()
    weight_sync: WeightSync = Field(default_factory=WeightSync)
    precision: Precision = Precision()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    slurm: Slurm = Slurm()

    def with_values(self, changes: Mapping[str, Mapping[str, Any]]) -> "Config":
        """A copy in which some values differ, checked like any configuration.

        Args:
            changes: Values by section and key.

        Raises:
            ValueError: The changed configuration breaks a rule.
        """
        tree = self.model_dump()
        for section, values in changes.items():
            tree[section] |= values
        return Config.model_validate(tree)

    @property
    def parallel_layout(self) -> Layout:
        """The parallelism layout of the trainer's ranks."""
        section = self.layout
        return Layout(
            world_size=section.world_size, tp=section.tensor, pp=section.pipeline, cp=section.context, ep=section.expert,
            etp=section.expert_tensor, vpp=section.virtual_pipeline,
            first_stage_layers=section.first_stage_layers, last_stage_layers=section.last_stage_layers,
        )  # fmt: skip

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence over the tensor-parallel ranks."""
        asked = self.layout.sequence_parallel
        return self.layout.tensor > 1 if asked is None else asked

    @property
    def fingerprints(self) -> bool:
        """Whether a checksum of every tensor is recorded after each step."""
        asked = self.run.fingerprints
        return self.run.deterministic if asked is None else asked

    @property
    def sampling(self) -> Sampling:
        """How training rollouts are sampled."""
        r = self.rollouts
        return Sampling(temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, max_new_tokens=r.max_new_tokens)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Decided without torch: the orchestrator and the workers run without it."""
        if self.run.device != "auto":
            return self.run.device
        return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"

    @property
    def transport(self) -> Literal["gloo", "nccl"]:
        """How weights are sent to the servers."""
        asked = self.weight_sync.transport
        return asked if asked != "auto" else ("nccl" if self.device == "cuda" else "gloo")

    @property
    def servers_have_nvfp4_layers(self) -> bool:
        """Whether the servers' NVFP4 layers take packed weights as they are; over Gloo the servers unpack them."""
        return self.precision.rollouts == "nvfp4" and self.transport == "nccl"

    @property
    def rank_multiple(self) -> int:
        """What the number of positions that a rank's linear layers see is a multiple of.

        Transformer Engine's FP4 kernels ask for 16, those that transform for 64; Megatron-Core pads an expert's tokens to 128.
        """
        return 128 if self.precision.training == "native" else 1

    @property
    def keep_set_source(self) -> Literal["native", "processed_logprobs"]:
        """How the inference engine reports keep-sets: one choice for the complete run."""
        asked = self.rollouts.keep_set_source
        return asked if asked != "auto" else ("native" if self.device == "cuda" else "processed_logprobs")

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that one training step consumes."""
        return self.rollouts.prompts_per_step * self.rollouts.samples_per_prompt

    @property
    def groups_per_server(self) -> int:
        """Groups in flight on one server: a quarter more than it runs at once, so that it never waits for the next."""
        return -(-5 * self.servers.max_num_seqs // (4 * self.rollouts.samples_per_prompt))

    @property
    def probe_tolerance(self) -> float:
        """Largest mean |log p_trainer - log p_rollout| of a probe."""
        asked = self.weight_sync.probe_tolerance
        return asked if asked is not None else (1e-4 if self.model.dtype == "float32" else 0.1)

    @model_validator(mode="after")
    def _rules(self) -> "Config":
        broken = [message for rule in _RULES if (message := rule(self))]
        if broken:
            raise ValueError("; ".join(broken))
        return self


def layout_values(layout: Layout) -> dict[str, int | None]:
    """The values of [layout] that make `Config.parallel_layout` this layout."""
    return {
        "world_size": layout.world_size, "tensor": layout.tp, "pipeline": layout.pp, "virtual_pipeline": layout.vpp,
        "context": layout.cp, "expert": layout.ep, "expert_tensor": layout.etp,
        "first_stage_layers": layout.first_stage_layers, "last_stage_layers": layout.last_stage_layers,
    }  # fmt: skip


def _one_model(c: Config) -> str | None:
    if (c.model.path is None) == (c.model.architecture is None):
        return "model: give either path or architecture, and not both"
    return None


def _one_task(c: Config) -> str | None:
    if (c.task.name is None) == (c.task.file is None):
        return "task: give either name (a reasoning-gym task) or file (JSON lines), and not both"
    return None


def _layout_divides(c: Config) -> str | None:
    try:
        layout = c.parallel_layout
    except ValueError as error:
        return f"layout: {error}"
    if c.layout.sequence_parallel and c.layout.tensor == 1:
        return "layout.sequence_parallel = true needs layout.tensor > 1; remove the key, or raise layout.tensor"
    if c.layout.tensor > 1 and layout.ep > 1 and not c.sequence_parallel:
        return "layout.sequence_parallel = false: Megatron-Core needs it for experts with layout.tensor > 1; remove the key"
    return None


def _completion_fits(c: Config) -> str | None:
    if c.rollouts.max_new_tokens >= c.model.max_sequence_length:
        return (
            f"rollouts.max_new_tokens = {c.rollouts.max_new_tokens} leaves no room for a prompt in "
            f"model.max_sequence_length = {c.model.max_sequence_length}; lower the former, or raise the latter"
        )
    return None


def _sequence_fits_microbatch(c: Config) -> str | None:
    if c.model.max_sequence_length > c.trainer.max_tokens_per_microbatch:
        return (
            f"model.max_sequence_length = {c.model.max_sequence_length} is above trainer.max_tokens_per_microbatch = "
            f"{c.trainer.max_tokens_per_microbatch}: a sequence is never split over microbatches; raise the "
            "latter"
        )
    return None


def _keep_sets_are_bounded(c: Config) -> str | None:
    r = c.rollouts
    if r.top_p < 1.0 and r.top_k == 0:
        return (
            f"rollouts.top_p = {r.top_p} with top_k = 0: keep-sets are complete only up to a bounded size; set rollouts.top_k, "
            "for example 64"
        )
    if c.keep_set_source == "processed_logprobs" and r.top_k > r.max_keep_set:
        return (
            f"rollouts.top_k = {r.top_k} is above rollouts.max_keep_set = {r.max_keep_set}: keep-sets would be incomplete; "
            "raise max_keep_set"
        )
    return None


def _correction_counts_once(c: Config) -> str | None:
    if c.objective.old_policy == "rollout" and c.objective.correction != "none":
        return (
            "objective.old_policy = 'rollout': r = p / p_rollout already contains the complete correction; "
            f"objective.correction = '{c.objective.correction}' would apply it twice, so set it to 'none'"
        )
    return None


def _correction_range(c: Config) -> str | None:
    if c.objective.correction_low >= c.objective.correction_high:
        return (
            f"objective.correction_low = {c.objective.correction_low} has to be below objective.correction_high = "
            f"{c.objective.correction_high}; lower the former, or raise the latter"
        )
    return None


def _split_divides(c: Config) -> str | None:
    if c.rollouts.prompts_per_step % c.trainer.updates_per_step:
        return (
            f"rollouts.prompts_per_step = {c.rollouts.prompts_per_step} is not a multiple of trainer.updates_per_step = "
            f"{c.trainer.updates_per_step}; change one of them"
        )
    return None


def _ports_exist(c: Config) -> str | None:
    if c.servers.first_port + c.servers.count - 1 > LAST_PORT:
        return (
            f"servers.first_port = {c.servers.first_port} with servers.count = {c.servers.count} exceeds port {LAST_PORT}; "
            "lower it, or set it to 0, which chooses free ports"
        )
    return None


def _servers_divide(c: Config) -> str | None:
    if c.servers.tensor % c.servers.nodes:
        return (
            f"servers.tensor = {c.servers.tensor} is not a multiple of servers.nodes = {c.servers.nodes}: each node of a server "
            "holds an equal part of its tensor-parallel ranks; change one of them"
        )
    return None


def _turns_need_environment(c: Config) -> str | None:
    if c.rollouts.max_turns > 1 and c.task.environment is None:
        return (
            f"rollouts.max_turns = {c.rollouts.max_turns} needs task.environment, the function that answers the policy; set it, "
            "or max_turns = 1"
        )
    return None


def _ranks_outwait_an_update(c: Config) -> str | None:
    if c.trainer.collective_timeout_s <= c.weight_sync.timeout_s:
        return (
            f"trainer.collective_timeout_s = {c.trainer.collective_timeout_s:g} is not above weight_sync.timeout_s = "
            f"{c.weight_sync.timeout_s:g}: the other ranks wait in a collective while rank 0 updates the servers; raise the "
            "former"
        )
    return None


def _learning_rates(c: Config) -> str | None:
    if c.optimizer.min_learning_rate > c.optimizer.learning_rate:
        return (
            f"optimizer.min_learning_rate = {c.optimizer.min_learning_rate:g} is above optimizer.learning_rate = "
            f"{c.optimizer.learning_rate:g}; lower the former"
        )
    return None


def _optimizer_settings_are_used(c: Config) -> str | None:
    """Each optimizer's own settings are a section of its name."""
    for name, value in c.optimizer:
        if isinstance(value, Section) and name != c.optimizer.name and value != type(value)():
            return (
                f"optimizer.{name} is given, but optimizer.name = '{c.optimizer.name}'; set it to '{name}', or remove the section"
            )
    return None


def _same_weights_on_both_sides(c: Config) -> str | None:
    """Trainer and servers may differ on purpose, to see the effect; the tolerance then says by how much."""
    differ = (c.precision.training == "full") != (c.precision.rollouts == "full")
    if differ and c.weight_sync.probe_tolerance is None:
        return (
            f"precision.training = '{c.precision.training}' with precision.rollouts = '{c.precision.rollouts}': trainer and "
            "servers hold different weights; use 'qat' or 'native' together with 'nvfp4', or set weight_sync.probe_tolerance to "
            "the difference that you accept (docs/nvfp4.md says how large it is)"
        )
    return None


def _activations_have_their_mode(c: Config) -> str | None:
    p = c.precision
    if p.activations == "full":
        return None
    if p.training == "full":
        return "precision.activations = 'nvfp4' needs precision.training = 'qat' or 'native', not 'full'; set it"
    if p.training == "qat" and c.device == "cuda":
        return (
            "precision.activations = 'nvfp4' with precision.training = 'qat' on a GPU: Transformer Engine's linear layers start "
            "with a fused norm, after which nothing but its own FP4 can quantise; set precision.training = 'native'"
        )
    return None


def _same_activations_on_both_sides(c: Config) -> str | None:
    """Native training quantises what it multiplies, and so do servers with vLLM's FP4 kernels; all others do not."""
    p = c.precision
    if c.weight_sync.probe_tolerance is not None:
        return None
    if p.training == "native" and p.activations == "full":
        return (
            "precision.training = 'native' with precision.activations = 'full': Transformer Engine multiplies inputs in NVFP4, "
            "and the servers would multiply them in full precision (W4A16); set precision.activations = 'nvfp4' (W4A4), or "
            "weight_sync.probe_tolerance to the difference that you accept (docs/nvfp4.md says how large it is)"
        )
    if p.activations == "nvfp4" and not (p.training == "native" and c.servers_have_nvfp4_layers):
        return (
            "precision.activations = 'nvfp4': only servers with vLLM's FP4 kernels (Blackwell GPUs, weights over nccl) "
            "quantise activations; all others multiply them in full precision; set weight_sync.probe_tolerance to the "
            "difference that you accept (docs/nvfp4.md says how large it is)"
        )
    return None


def _native_fp4_is_what_it_says(c: Config) -> str | None:
    p = c.precision
    if p.training != "native":
        if p.backward == "nvfp4":
            return f"precision.backward = 'nvfp4' needs precision.training = 'native', not '{p.training}'; set it to 'full'"
        return None
    if c.model.dtype != "bfloat16":
        return (
            f"precision.training = 'native' with model.dtype = '{c.model.dtype}': Transformer Engine's FP4 takes bfloat16; "
            "set model.dtype = 'bfloat16'"
        )
    if p.backward == "nvfp4" and c.run.deterministic:
        return (
            "precision.backward = 'nvfp4' with run.deterministic = true: gradients are rounded at random; set "
            "precision.backward = 'full'"
        )
    if set_anew := sorted(name for name in c.slurm.trainer.environment if changes_fp4(name)):
        return (
            f"slurm.trainer.environment sets {', '.join(set_anew)}: Transformer Engine would round otherwise than the servers; "
            "remove it"
        )
    return None


def _packed_weights_have_a_taker(c: Config) -> str | None:
    if c.servers_have_nvfp4_layers and c.model.dtype != "bfloat16":
        return (
            f"precision.rollouts = 'nvfp4' over nccl with model.dtype = '{c.model.dtype}': vLLM's NVFP4 layers multiply in "
            "bfloat16; set model.dtype = 'bfloat16', or precision.rollouts = 'full'"
        )
    return None


def _members_of_a_communicator_agree(c: Config) -> str | None:
    """The servers' workers and trainer rank 0 share one."""
    of_trainer, of_servers = c.slurm.trainer.environment, c.slurm.rollouts.environment
    differ = [name for name in ("NCCL_ALGO", "NCCL_PROTO") if of_trainer.get(name) != of_servers.get(name)]
    if c.transport == "nccl" and differ:
        return (
            f"slurm.trainer.environment and slurm.rollouts.environment differ in {', '.join(differ)}: trainer rank 0 and the "
            "servers share an NCCL communicator, whose members hang where they differ; give both the same value"
        )
    return None


def _signal_comes_within_the_time_limit(c: Config) -> str | None:
    limit = c.slurm.time_limit_s
    if limit is not None and c.slurm.signal_before_end_s >= limit:
        return (
            f"slurm.signal_before_end_s = {c.slurm.signal_before_end_s} is not below slurm.time_limit = '{c.slurm.time_limit}', "
            f"which is {limit} s: the job would be told to save and requeue itself as soon as it starts; lower the former, or "
            "raise the latter"
        )
    return None


def _native_fp4_has_a_gpu(c: Config) -> str | None:
    if c.precision.training == "native" and c.device == "cpu":
        return "precision.training = 'native' needs a Blackwell GPU and Transformer Engine; on a CPU use 'qat'"
    return None


def _trained_mtp_is_in_full_precision(c: Config) -> str | None:
    if c.model.mtp == "trained" and c.precision.training != "full":
        return (
            f"model.mtp = 'trained' with precision.training = '{c.precision.training}': layers for multi-token prediction "
            "cannot be quantised; set model.mtp = 'carried'"
        )
    return None


_RULES = (
    _one_model,
    _one_task,
    _layout_divides,
    _completion_fits,
    _sequence_fits_microbatch,
    _keep_sets_are_bounded,
    _correction_counts_once,
    _correction_range,
    _split_divides,
    _ranks_outwait_an_update,
    _learning_rates,
    _optimizer_settings_are_used,
    _ports_exist,
    _servers_divide,
    _turns_need_environment,
    _same_weights_on_both_sides,
    _activations_have_their_mode,
    _same_activations_on_both_sides,
    _native_fp4_is_what_it_says,
    _packed_weights_have_a_taker,
    _members_of_a_communicator_agree,
    _signal_comes_within_the_time_limit,
    _native_fp4_has_a_gpu,
    _trained_mtp_is_in_full_precision,
)
