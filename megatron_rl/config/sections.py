"""The sections of a run's configuration: every field typed, described and with its one default."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]


def _one_word(text: str) -> str:
    if not text or any(not "!" <= character <= "~" for character in text):
        raise ValueError(
            f"{text!r} holds a blank, a line end or a character beyond ASCII, and stands in a batch script as one word: leave it out"
        )
    return text


Word = Annotated[str, AfterValidator(_one_word)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder is FOLDER/NAME."""
    folder: Path = Path("runs")
    steps: Positive
    """Training steps of the whole run; a resumed run ends at the same step."""
    seed: NonNegative = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where the NVIDIA driver is loaded, else cpu."""
    deterministic: bool = False
    """Refuse every operation whose result could differ from run to run."""
    stall_after_s: Seconds = 300.0
    """After so long without a finished group or step, a message says who waits for whom; again each time as much later."""
    fingerprints: bool | None = None
    """Record a checksum of every tensor after each step, so that `megatron-rl replay` can name the first one that differs.
    None: exactly when the run is deterministic."""


class Model(Section):
    path: Path | None = None
    """A Hugging Face folder (config.json, safetensors, tokenizer), or what `megatron-rl convert hf-to-megatron` made of one."""
    architecture: dict[str, Any] | None = None
    """Instead of a path: a Hugging Face config.json written out here; the model starts from random weights and a character tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations of the trainer, and of the rollout servers."""
    max_sequence_length: Positive = 4096
    """Prompt and completion together, in tokens."""
    mtp: Literal["carried", "trained"] = "carried"
    """Layers for multi-token prediction, where the model has them. carried: they are not built, and exports bring them unchanged. trained: they
    learn to predict the rollouts' tokens by a loss of their own, which reaches nothing but them."""


class LayoutSection(Section):
    """Parallel sizes of the trainer; the data-parallel size follows from them."""

    world_size: Positive = 1
    """Trainer ranks."""
    tensor: Positive = 1
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    """Chunks of layers on each stage; above 1 the schedule is interleaved."""
    first_stage_layers: Positive | None = None
    last_stage_layers: Positive | None = None
    """Layers of the first and last stage where they differ from the others'; None: as many as the others."""
    context: Positive = 1
    expert: Positive = 1
    expert_tensor: Positive = 1
    sequence_parallel: bool | None = None
    """None: on exactly when tensor > 1."""


class Trainer(Section):
    max_tokens_per_microbatch: Positive = 16384
    """Packed tokens of one microbatch; a single longer sequence is an error."""
    recompute: Literal["none", "selective", "full"] = "none"
    updates_per_step: Positive = 1
    """Optimizer steps that one batch is split into."""
    threads_per_rank: Positive = 1
    """CPU threads of each rank; fixed, since the number changes the order of sums."""
    collective_timeout_s: Seconds = 600.0
    """For a rank to come to where the others wait; then all ranks end, and say which one was missing."""
    max_restarts: NonNegative = 3
    """How often the trainer is started again from the latest checkpoint, without a finished step in between, before the run ends."""


class Muon(Section):
    """For the weight matrices of attention, MLPs and experts, with optimizer.name = 'muon'; the rest stays with AdamW."""

    learning_rate: Annotated[float, Field(gt=0.0)] | None = None
    """At the peak; warm-up and decay are the optimizer's. None: optimizer.learning_rate, since updates have AdamW's size."""
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None
    """None: optimizer.weight_decay."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    newton_schulz_steps: Positive = 5
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is faster on a GPU, and its updates are far off where a gradient has few directions."""
    qk_clip: Annotated[float, Field(gt=0.0)] | None = None
    """After each step, scale down the queries and keys of heads whose largest attention logit was above this (100 in Kimi K2). For models
    that do not normalise q and k. None: off."""
    round_mib: Positive = 512
    """Of fp32 gradients that a rank exchanges at a time, by whole layers; the next exchange runs beside the work on the last. Many ranks share
    the work of a round evenly only if it has several layers."""

    def relative_to(self, learning_rate: float) -> "Muon":
        """The same settings with the learning rate as a multiple of AdamW's."""
        own = self.learning_rate
        return self.model_copy(update={"learning_rate": own and own / learning_rate})


class Optimizer(Section):
    name: Literal["adamw", "muon"] = "adamw"
    """muon: for weight matrices, AdamW with the values below for the rest."""
    muon: Muon = Muon()
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-6
    min_learning_rate: Annotated[float, Field(ge=0.0)] = 0.0
    warmup_steps: NonNegative = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From the end of the warm-up to the last step of the run."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """0: no clipping."""

    def update_settings(self) -> list[Any]:
        """What an update at a given learning rate depends on: plain values, and the chosen optimizer's own section, if it has one."""
        shared = [self.weight_decay, self.beta1, self.beta2]
        own = {"muon": self.muon}.get(self.name)
        return shared if own is None else [*shared, own.relative_to(self.learning_rate)]


class Objective(Section):
    name: Literal["grpo", "cispo", "gspo"] = "grpo"
    """grpo: clipped surrogate on token ratios; cispo: clipped, detached ratio times log p; gspo: clipped surrogate on sequence ratios."""
    advantage: Literal["group_mean", "group_mean_std"] = "group_mean"
    """Reward minus the group's mean; divided by the group's standard deviation with _std."""
    clip_low: Annotated[float, Field(ge=0.0)] = 0.2
    clip_high: Annotated[float, Field(ge=0.0)] = 0.28
    """Ratios r = p / p_old are clipped to [1 - clip_low, 1 + clip_high]."""
    old_policy: Literal["recomputed", "rollout"] = "recomputed"
    """recomputed: the trainer's own log-probs at the start of the step. rollout: the recorded ones (bypass); then r carries the whole correction."""
    correction: Literal["none", "truncate", "mask_token", "mask_sequence"] = "truncate"
    """What is done with w = p_old / p_rollout: min(w, high); tokens outside [low, high] left out; sequences whose geometric mean is outside left out."""
    correction_low: Annotated[float, Field(ge=0.0)] = 0.5
    correction_high: Annotated[float, Field(gt=0.0)] = 2.0
    off_policy_sequence_delta: Annotated[float, Field(gt=0.0)] | None = None
    """Leave out a sequence with a negative advantage whose mean(log p_rollout - log p) is above this. None: off."""
    kl_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL to the policy that the run started from. 0: no reference model is kept."""
    normalisation: Literal["token", "sequence"] = "token"
    """The loss's denominator: the step's number of loss tokens, or of sequences (each sequence the mean of its tokens)."""
    keep_set_replay: bool = True
    """Renormalise the trainer's distribution over each token's recorded keep-set."""
    routing_replay: bool = True
    """Send each token to the experts that the rollout recorded."""


class Task(Section):
    name: str | None = None
    """A reasoning-gym task, e.g. 'chain_sum'."""
    arguments: dict[str, Any] = {}
    """Passed to the reasoning-gym task."""
    file: Path | None = None
    """Instead of a name: JSON lines with 'prompt' and 'answer' (and 'solution' for a supervised start)."""
    prompt_template: str = "{prompt}"
    """The text given to the tokenizer; {prompt} stands for the task's question, and other fields of an item go by their names, such as
    chain_sum's {expression}; braces that are meant as such are written twice."""
    chat_template: bool = False
    """Wrap the prompt as a user message by the tokenizer's chat template."""
    answer_template: str = "{answer}"
    """The worked solution for supervised steps where the task itself brings none."""
    reward: str | None = None
    """module:function called as f(prompt: str, completion: str, item: dict) -> float; None: the task's own."""
    environment: str | None = None
    """module:function called as f(turns: list[dict], item: dict) -> str | None after each turn of the policy, for rollouts.max_turns > 1;
    its text is read as it stands, None ends the episode."""
    timeout_s: Seconds = 300.0
    """For all rewards of a group, or one answer of the environment; after it the group has failed, and is drawn again."""
    size: Positive = 1_000_000
    """Number of different prompts drawn from a reasoning-gym task before it repeats."""


class Supervised(Section):
    """Supervised steps on worked solutions before the first rollout; their result is kept in the run's folder."""

    steps: NonNegative = 0
    """0: start from the model as it is."""
    batch_size: Positive = 64
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    warmup_steps: NonNegative = 10


class Rollouts(Section):
    prompts_per_step: Positive = 32
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    max_staleness: NonNegative = 2
    """The most policy versions between the sampling of a token and the step that consumes it."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """From 0.01: below it vLLM samples at 0.01, which would be another policy than the one that the trainer scores."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
    top_k: NonNegative = 64
    """0: no limit, which full sampling alone (top_p = 1) can have: a keep-set comes whole only when its size is bounded."""
    max_new_tokens: Positive = 1024
    stop_at_newline: bool = False
    """End a completion at the first newline (beside the end-of-sequence token)."""
    max_turns: Positive = 1
    """Above 1: the task's environment may answer, and the policy goes on; its tokens carry no loss."""
    max_attempts: Positive = 3
    """How often a prompt is drawn before it is dropped, when its rollouts break their contract or cannot be scored."""
    keep_set_source: Literal["auto", "native", "processed_logprobs"] = "auto"
    """auto: native on a GPU (vLLM's sampling mask), processed_logprobs on a CPU."""
    max_keep_set: Positive = 64
    """Widest set that processed_logprobs can carry; a wider one is refused as incomplete."""
    concurrent_groups: NonNegative = 0
    """Groups in flight; 0: as many as the staleness bound allows."""


class Servers(Section):
    engine: str = "vllm"
    """The inference engine."""
    count: Positive = 1
    host: str = "127.0.0.1"
    first_port: NonNegative = 0
    """Servers listen on first_port, first_port + 1, ...; 0: free ports."""
    tensor: Positive = 1
    max_num_seqs: Positive = 64
    kv_cache_gib: Positive = 1
    """CPU servers."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    threads: Positive = 1
    """CPU threads of one server."""
    start_timeout_s: Seconds = 600.0
    request_timeout_s: Seconds = 600.0
    max_restarts: NonNegative = 3
    """Of one server, before the run gives up on it."""
    extra_arguments: list[str] = []
    """Passed on to the engine's server as they are."""


class WeightSync(Section):
    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on a GPU, gloo on a CPU."""
    bucket_mib: Positive = 64
    timeout_s: Seconds = 300.0
    probe_prompts: Positive = 4
    """After each sync, so many prompts are sampled as in training and scored by the trainer at equal weights."""
    probe_every: Positive = 1
    """Steps between probes."""
    probe_tolerance: Annotated[float, Field(gt=0.0)] | None = None
    """Largest mean |log p_trainer - log p_rollout| of a probe; above it the server leaves the fleet. None: 1e-4 in float32, 0.1 in bfloat16."""


class Precision(Section):
    """Four-bit weights (NVFP4) in training and on the rollout servers."""

    training: Literal["full", "qat", "native"] = "full"
    """full: `model.dtype`. qat: forward passes use weights that have been through NVFP4, which are those that the servers hold with
    rollouts = "nvfp4"; gradients go straight through to the weights. native: Megatron's fp4 training by Transformer Engine's
    NVFP4BlockScaling recipe, on Blackwell GPUs only."""
    rollouts: Literal["full", "nvfp4"] = "full"
    """nvfp4: the servers get packed NVFP4 weights: over NCCL into vLLM's NVFP4 layers; over Gloo, as on a CPU, they unpack them into
    `model.dtype`."""
    activations: Literal["full", "nvfp4"] = "full"
    """nvfp4: with training = "qat", inputs of the quantised linear maps go through NVFP4, too (W4A4); gradients go straight through."""
    activation_amax: Annotated[float, Field(gt=0.0)] = 256.0
    """The one magnitude that the global scale of all quantised activations comes from; larger inputs are cut off at it."""
    modules: list[Literal["attention", "mlp", "experts"]] = ["attention", "mlp", "experts"]
    """Which linear maps are quantised: those of attention, of dense MLPs and shared experts, of routed experts. Embeddings, output layer,
    routers and norms never are."""
    exclude: list[str] = []
    """Modules that stay as they are, by Hugging Face names, whole segments from the first on: "model.layers.0", "model.layers.*.self_attn".
    A segment may hold *, ? and [...]."""


class Checkpoint(Section):
    every: Positive = 20
    """Steps between checkpoints; one is also written at the end and on Ctrl-C."""
    keep: Positive = 2
    spool_steps: NonNegative | None = None
    """Steps before the oldest kept checkpoint whose rollouts stay in the spool, to be looked into or trained again. None: all of them."""
    export: bool = True
    """Write a Hugging Face folder at the end."""


class Metrics(Section):
    tensorboard: bool = True
    wandb_project: str | None = None
    examples_per_step: NonNegative = 2
    """Readable rollouts kept in the run's folder for each step."""
    entropy_full_tokens: NonNegative = 128
    """Loss tokens of each microbatch on which the entropy over the whole vocabulary is measured."""


class RoleNodes(Section):
    """The nodes of one role. What is None here is taken from [slurm]."""

    nodes: Positive = 1
    gpus_per_node: NonNegative = 8
    """GPUs of a node that the run uses; 0: none, the run computes on CPUs."""
    partition: Word | None = None
    constraint: Word | None = None
    """Features that the nodes have to have, as sbatch's --constraint takes them."""
    environment: dict[str, str] = {}
    """Variables of this role's processes alone, such as NCCL's; they win over the program's own choice."""


class Slurm(Section):
    """What a run asks of a cluster; `megatron-rl launch` reads it, a run on one machine does not. A site keeps what does not change from run
    to run in one file with a [slurm] section: `launch --profile FILE`."""

    trainer: RoleNodes = RoleNodes()
    rollouts: RoleNodes = RoleNodes()
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$", coerce_numbers_to_str=True)] | None = None
    """As sbatch takes it: minutes, hours:minutes:seconds, days-hours:minutes:seconds. None: the partition's own."""
    signal_before_end_s: Positive = 600
    """So long before the time limit the job is told to finish its step, save and requeue itself. It has to cover the longest step and
    the writing of a checkpoint."""
    requeue: bool = True
    """After the time limit, a preemption or a failure: go on in the next life of the same job."""
    max_lives_without_checkpoint: Positive = 3
    """Lives of the job, one after the other, that end without a further checkpoint, before it no longer requeues itself."""
    exclusive: bool = True
    """Ask for whole nodes."""
    request_gpus: bool = True
    """Ask for GPUs by --gpus-per-node; false where a site gives them with the node."""
    arguments: list[Word] = []
    """Further arguments of sbatch for all components of the job, each as one word: "--reservation=name"."""
    prologue: str = ""
    """Shell lines that run on the job's first node before anything else: modules, exports. What they export reaches every process."""
    python: str | None = None
    """The interpreter on the nodes or in the container. None: the one that runs `megatron-rl launch`."""
    interface: str | None = None
    """The network interface that the processes of the run listen on and reach one another by, such as "ib0". None: whatever the first
    node's host name means, and on the other nodes the interface on the way there."""
    container_image: str | None = None
    """An image for pyxis and enroot; None: no container."""
    container_mounts: list[str] = []
    """SOURCE:TARGET, as pyxis takes them; the run's folder and the folder of the submission are mounted anyway."""
    join_timeout_s: Seconds = 600.0
    """For all nodes to join the run, the start of their containers included."""
