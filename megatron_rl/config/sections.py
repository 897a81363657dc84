"""The sections of a run's configuration: every field typed, described and with its one default."""

import re
from datetime import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number; give an integer")  # noqa: TRY004 - pydantic reports these alone
    return value


Positive = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1)]
NonNegative = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]


def _one_word(text: str) -> str:
    if not text or any(not "!" <= character <= "~" for character in text):
        raise ValueError(
            f"{text!r} has to be one word of printable ASCII characters, because it becomes one word of a batch script; "
            "remove blanks and line ends"
        )
    return text


Word = Annotated[str, AfterValidator(_one_word)]


_SET_BY_THE_PROGRAM = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")


def _variable_names(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable: letters, digits and _, no digit first; correct it")
        if name in _SET_BY_THE_PROGRAM or name.startswith("MEGATRON_RL_"):
            raise ValueError(f"{name} is set by the program itself, for each process; remove it")
        if "\0" in value:
            raise ValueError(f"{name} = {value!r}: an environment variable cannot hold a NUL character; remove it")
    return variables


class Section(BaseModel):
    """A table of the TOML file. Unknown keys are refused; the text under each field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _time_as_text(value: Any) -> Any:
    """TOML reads 04:00:00 without quotes as a time of day."""
    return value.isoformat() if isinstance(value, time) else value


class Run(Section):
    """What the run is called, how long it is, and how it is started."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run. Its folder is `run.folder`/`run.name`."""
    folder: Path = Path("runs")
    """Folder that holds the folders of runs. On a cluster, all nodes have to see it."""
    steps: Positive
    """Number of training steps of the run. A resumed run ends at the same step."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of sampling, of random weights, and of the order of prompts. The servers' seeds are counted up from it; numpy, which
    vLLM seeds, takes none above 2^32 - 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer and the servers compute; nothing else decides it. cpu: no process sees a GPU. auto: cuda where the
    NVIDIA driver is loaded, otherwise cpu."""
    deterministic: bool = False
    """Refuse every operation whose result could differ from one run to the next."""
    stall_after_s: Seconds = 300.0
    """Seconds without a finished group or step after which a message says which process waits for which. It is repeated each time
    that the wait has lasted as much longer."""
    fingerprints: bool | None = None
    """Record a checksum of every tensor after each step, so that `megatron-rl replay` can name the first tensor that differs.
    None: on when `run.deterministic` is true, off otherwise."""


class Model(Section):
    """The policy's model. Give either `path` or `architecture`."""

    path: Path | None = None
    """A Hugging Face folder (config.json, safetensors, tokenizer), or one that `megatron-rl convert hf-to-megatron` wrote. None:
    `model.architecture` describes the model."""
    published_config: Path | None = None
    """The config.json of the model as its authors publish it. `plan`, `check` and every --dry-run read it while `model.path` does
    not exist, so that a configuration can be looked at before anything is downloaded."""
    architecture: dict[str, Any] | None = None
    """The content of a Hugging Face config.json, in place of a path. The model starts from random weights and has a tokenizer of
    characters. None: `model.path` names the model."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations, in the trainer and on the servers."""
    max_sequence_length: Positive = 4096
    """Largest number of tokens of a prompt and its completion together."""
    mtp: Literal["carried", "trained"] = "carried"
    """What happens to the layers for multi-token prediction, where the model has them. carried: they are not built, and exports
    contain them unchanged. trained: they learn to predict the rollouts' tokens by a loss of their own, whose gradient reaches no
    other layer."""


class LayoutSection(Section):
    """The parallelism layout of the trainer. The data-parallel size follows: world_size / (tensor x context x pipeline)."""

    world_size: Positive = 1
    """Number of trainer ranks."""
    tensor: Positive = 1
    """Tensor-parallel size."""
    pipeline: Positive = 1
    """Number of pipeline stages."""
    virtual_pipeline: Positive = 1
    """Number of chunks of layers on each pipeline stage. Above 1 the schedule is interleaved."""
    first_stage_layers: Positive | None = None
    """Number of layers of the first pipeline stage, where it differs from the other stages. None: as many as the others."""
    last_stage_layers: Positive | None = None
    """Number of layers of the last pipeline stage, where it differs from the other stages. None: as many as the others."""
    context: Positive = 1
    """Context-parallel size: number of ranks that share the tokens of a sequence."""
    expert: Positive = 1
    """Expert-parallel size: number of ranks that the experts of a layer are distributed over."""
    expert_tensor: Positive = 1
    """Tensor-parallel size inside each expert."""
    sequence_parallel: bool | None = None
    """Split activations along the sequence over the tensor-parallel ranks, outside of attention and MLPs. None: on when
    `layout.tensor` is above 1, off otherwise."""


class Trainer(Section):
    """The trainer's ranks and how a step is divided."""

    max_tokens_per_microbatch: Positive = 16384
    """Largest number of packed tokens of one microbatch. A single longer sequence is an error."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations the backward pass computes again in place of keeping them: none, those of core attention and experts
    (selective), or all of a layer (full). It trades time for memory."""
    updates_per_step: Positive = 1
    """Number of optimizer updates that the batch of one step is split into."""
    threads_per_rank: Positive = 1
    """Number of CPU threads of each rank. It is fixed, since it changes the order of sums and with it the result."""
    collective_timeout_s: Seconds = 600.0
    """Seconds that a rank waits for the others in a collective. After that all ranks end and report which one was missing."""
    max_restarts: NonNegative = 3
    """How often the trainer is started again from the latest checkpoint, within ten finished steps, before the run ends."""


class Muon(Section):
    """Muon for the weight matrices of attention, MLPs and experts, with optimizer.name = 'muon'.

    AdamW updates all other parameters.
    """

    learning_rate: Annotated[float, Field(gt=0.0)] | None = None
    """Learning rate at its peak; warm-up and decay are those of [optimizer]. None: `optimizer.learning_rate`, since Muon's
    updates are scaled to the size of AdamW's."""
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None
    """Decoupled weight decay. None: `optimizer.weight_decay`."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Coefficient of the momentum (Nesterov)."""
    newton_schulz_steps: Positive = 5
    """Number of Newton-Schulz iterations that orthogonalise an update."""
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the iterations' matrix products. bfloat16 is faster on a GPU, but its updates are far off where a gradient has few
    directions."""
    qk_clip: Annotated[float, Field(gt=0.0)] | None = None
    """After each step, scale down the query and key weights of heads whose largest attention logit was above this value (100 in
    Kimi K2). For models that do not normalise q and k. None: off."""
    round_mib: Positive = 512
    """MiB of fp32 gradients that a rank exchanges at a time, in whole layers. The next exchange runs while the last one is worked
    on. Many ranks share the work of a round evenly only if it has several layers."""

    def relative_to(self, learning_rate: float) -> "Muon":
        """The same settings with the learning rate as a multiple of AdamW's."""
        own = self.learning_rate
        return self.model_copy(update={"learning_rate": own and own / learning_rate})


class Optimizer(Section):
    """The optimizer and the schedule of its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for all parameters. muon: Muon for weight matrices, AdamW with the values of this section for the rest."""
    muon: Muon = Muon()
    """The table [optimizer.muon]; it is refused unless optimizer.name = "muon"."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-6
    """Learning rate at its peak, after the warm-up."""
    min_learning_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: NonNegative = 0
    """Number of steps over which the learning rate rises linearly to its peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of the warm-up to the last step of the run."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW's decay of the mean of squared gradients."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's constant in the denominator."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Norm that larger gradients are scaled down to. 0: no clipping."""

    def update_settings(self) -> list[Any]:
        """What an update at a given learning rate depends on: plain values, and the chosen optimizer's own section, if any."""
        shared = [self.weight_decay, self.beta1, self.beta2]
        own = {"muon": self.muon}.get(self.name)
        return shared if own is None else [*shared, own.relative_to(self.learning_rate)]


class Objective(Section):
    """The policy loss and the corrections for rollouts of another policy. p is the trainer's probability of a token."""

    name: Literal["grpo", "cispo", "gspo"] = "grpo"
    """grpo: clipped surrogate on token ratios. cispo: clipped, detached ratio times log p. gspo: clipped surrogate on sequence
    ratios."""
    advantage: Literal["group_mean", "group_mean_std"] = "group_mean"
    """group_mean: reward minus the mean of its group. group_mean_std: that, divided by the standard deviation of the group."""
    clip_low: Annotated[float, Field(ge=0.0)] = 0.2
    """Ratios r = p / p_old are clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.28
    """Ratios r = p / p_old are clipped from above at 1 + clip_high."""
    old_policy: Literal["recomputed", "rollout"] = "recomputed"
    """Where log p_old comes from. recomputed: the trainer's own log-probs at the start of the step. rollout: the recorded ones; r
    then contains the complete off-policy correction."""
    correction: Literal["none", "truncate", "mask_token", "mask_sequence"] = "truncate"
    """What is done with the importance weight w = p_old / p_rollout. none: it is not used. truncate: the loss is weighted by
    min(w, correction_high). mask_token: tokens with w outside of [correction_low, correction_high] are left out. mask_sequence:
    sequences whose geometric mean of w is outside are left out."""
    correction_low: Annotated[float, Field(ge=0.0)] = 0.5
    """Lower end of the accepted importance weights, for mask_token and mask_sequence."""
    correction_high: Annotated[float, Field(gt=0.0)] = 2.0
    """Upper end of the accepted importance weights."""
    off_policy_sequence_delta: Annotated[float, Field(gt=0.0)] | None = None
    """Leave out a sequence with a negative advantage whose mean of log p_rollout - log p is above this value. None: off."""
    kl_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL divergence from the policy that the run started with. 0: no reference model is kept."""
    normalisation: Literal["token", "sequence"] = "token"
    """Denominator of the loss. token: the number of loss tokens of the step. sequence: the number of sequences, each of which
    contributes the mean of its tokens."""
    keep_set_replay: bool = True
    """Renormalise the trainer's distribution over each token's recorded keep-set."""
    routing_replay: bool = True
    """Send each token to the experts that the rollout recorded."""


class Task(Section):
    """Prompts and rewards. Give either `name` or `file`."""

    name: str | None = None
    """A reasoning-gym task, such as "chain_sum". None: `task.file` has the prompts."""
    arguments: dict[str, Any] = {}
    """Arguments of the reasoning-gym task."""
    file: Path | None = None
    """A file of JSON lines with "prompt" and "answer" (and "solution" for a supervised start), in place of a name. None:
    `task.name` names the task."""
    prompt_template: str = "{prompt}"
    """The text that the tokenizer gets. {prompt} stands for the task's question, and the other fields of an item are available by
    name, such as {expression} of chain_sum. A literal brace is written twice."""
    chat_template: bool = False
    """Wrap the prompt as a user message with the tokenizer's chat template."""
    system_prompt: str | None = None
    """The system message before the prompt, for task.chat_template = true. None: none; some templates have their own."""
    template_arguments: dict[str, Any] = {}
    """What else the chat template gets, such as enable_thinking = false, tools or documents, as transformers' apply_chat_template
    takes them. chat_template names one of several templates."""
    special_tokens: Literal["keep", "strip"] = "keep"
    """Special tokens in the text that rewards and environments get. keep: all but those that end a sequence or pad it, so that
    <think> or <answer> can be scored where they are special tokens. strip: none."""
    former_text: bool = False
    """Treat text as before December 2026, for a run that was started then: truncation and padding that tokenizer.json was saved
    with apply, eos_token_id is read from the first file that has it, and reference solutions end with the first such id."""
    answer_template: str = "{answer}"
    """The reference solution of supervised steps, where the task itself has none."""
    reward: str | None = None
    """module:function, called as f(prompt: str, completion: str, item: dict) -> float. A parameter named token_ids gets the ids
    of the completion. None: the task's own reward."""
    environment: str | None = None
    """module:function, called as f(turns: list[dict], item: dict) -> str | None after each turn of the policy, for
    rollouts.max_turns > 1. The policy reads the returned text as it is; when the function returns None, the episode ends. A
    parameter named token_ids gets the ids of the policy's last turn. None: episodes have one turn."""
    timeout_s: Seconds = 300.0
    """Seconds for all rewards of a group, or for one answer of the environment. After that the group has failed and is sampled
    again."""
    size: Positive = 1_000_000
    """Number of different prompts that a reasoning-gym task generates before it repeats them."""


class Supervised(Section):
    """Supervised steps on reference solutions before the first rollout. Their result is kept in the run's folder."""

    steps: NonNegative = 0
    """Number of supervised steps. 0: the run starts from the model as it is."""
    batch_size: Positive = 64
    """Examples in one supervised step."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    """Learning rate at its peak, after the warm-up."""
    warmup_steps: NonNegative = 10
    """Number of supervised steps over which the learning rate rises linearly."""


class Rollouts(Section):
    """How rollouts are sampled, and how old they may be."""

    prompts_per_step: Positive = 32
    """Prompts that one training step consumes."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt. Together they are a group, whose rewards are compared."""
    max_staleness: NonNegative = 2
    """Largest number of policy versions between the sampling of a token and the step that consumes it. 0: sampling and training
    take turns."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Divides the logits, on the servers and in the trainer. At least 0.01: below it vLLM samples at 0.01, which would be another
    policy than the one that the trainer scores."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
    """Sample from the smallest set of tokens whose probabilities sum up to this value. 1: no limit."""
    top_k: NonNegative = 64
    """Sample from this many of the most probable tokens. 0: no limit, which needs top_p = 1, because a keep-set is complete only
    when its size is bounded."""
    max_new_tokens: Positive = 1024
    """Largest number of tokens of a completion."""
    stop_at_newline: bool = False
    """End a completion at the first newline, in addition to the end-of-sequence token."""
    stop_tokens: tuple[str | int, ...] = ()
    """Tokens that end a completion besides all eos_token_id of generation_config.json and config.json: texts of single tokens, or
    ids."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The token that completes one is the completion's last."""
    max_turns: Positive = 1
    """Largest number of the policy's turns in an episode. Above 1, the task's environment may answer between them; its tokens
    carry no loss."""
    max_attempts: Positive = 3
    """How often a prompt is sampled, when its rollouts break their contract or cannot be scored, before it is dropped."""
    keep_set_source: Literal["auto", "native", "processed_logprobs"] = "auto"
    """How the server reports keep-sets. native: by vLLM's sampling mask. processed_logprobs: by the log-probs after truncation.
    auto: native on a GPU, processed_logprobs on a CPU."""
    max_keep_set: Positive = 64
    """Largest keep-set that processed_logprobs can carry. A larger one is refused as incomplete."""
    concurrent_groups: NonNegative = 0
    """Largest number of groups that are sampled at the same time. 0: as many as `rollouts.max_staleness` allows."""


class Servers(Section):
    """The rollout servers."""

    engine: str = "vllm"
    """The inference engine of the servers; "vllm" is the one that comes with the program."""
    count: Positive = 1
    """Number of servers."""
    host: str = "127.0.0.1"
    """Address that servers on this machine listen on."""
    first_port: NonNegative = 0
    """Servers listen on first_port, first_port + 1, and so on. 0: free ports are chosen."""
    tensor: Positive = 1
    """Tensor-parallel size of each server."""
    nodes: Positive = 1
    """Number of nodes that each server spans; each of them holds an equal part of the server's `tensor` ranks. Above 1 only
    `launch` can start the run."""
    max_num_seqs: Positive = 64
    """Largest number of sequences that a server decodes at the same time."""
    kv_cache_gib: Positive = 1
    """GiB of a server's key-value cache, on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    """Fraction of a GPU's memory that a server uses, on a GPU."""
    threads: Positive = 1
    """Number of CPU threads of each server."""
    start_timeout_s: Seconds = 600.0
    """Seconds in which a server has to start."""
    request_timeout_s: Seconds = 600.0
    """Seconds in which a server has to answer a request."""
    max_restarts: NonNegative = 3
    """How often one server is started again before the run continues without it."""
    extra_arguments: list[str] = []
    """Further arguments of the engine's server, passed on unchanged."""


class WeightSync(Section):
    """How new weights reach the servers, and how it is verified that they did."""

    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on a GPU, gloo on a CPU."""
    bucket_mib: Positive = 64
    """MiB of weights that are sent at a time."""
    timeout_s: Seconds = 300.0
    """Seconds in which one update has to finish on all servers."""
    probe_prompts: Positive = 4
    """Number of prompts that a probe samples after a sync, as in training, and that the trainer scores with equal weights."""
    probe_every: Positive = 1
    """Steps between two probes."""
    probe_tolerance: Annotated[float, Field(gt=0.0)] | None = None
    """Largest mean |log p_trainer - log p_rollout| of a probe. Above it the server is quarantined. None: 1e-4 in
    float32, 0.1 in bfloat16."""


class Precision(Section):
    """Four-bit weights (NVFP4) in training and on the rollout servers."""

    training: Literal["full", "qat", "native"] = "full"
    """full: `model.dtype`. qat: forward passes use weights that were rounded to NVFP4, which are those that the servers hold with
    rollouts = "nvfp4"; gradients pass the rounding unchanged (straight-through). native: Megatron's fp4 training on Blackwell
    GPUs: Transformer Engine's FP4 kernels multiply the servers' weights, and inputs that are rounded as servers round them
    (W4A4)."""
    rollouts: Literal["full", "nvfp4"] = "full"
    """full: `model.dtype`. nvfp4: the servers get packed NVFP4 weights. Over NCCL they go into vLLM's NVFP4 layers; over Gloo, as
    on a CPU, the servers unpack them into `model.dtype`."""
    activations: Literal["full", "nvfp4"] = "full"
    """full: `model.dtype`. nvfp4: with training = "qat" or "native", the inputs of quantised linear layers are rounded to NVFP4,
    too (W4A4); gradients pass the rounding unchanged. On a GPU this needs training = "native"."""
    activation_amax: Annotated[float, Field(gt=0.0)] = 256.0
    """Largest magnitude of an activation, from which the global scale of all quantised activations follows. Larger inputs are
    clipped."""
    backward: Literal["full", "nvfp4"] = "full"
    """With training = "native", how gradients are computed. full: by products in `model.dtype` with the values that the forward
    pass multiplied. nvfp4: by FP4 products as in Transformer Engine's recipe, with stochastic rounding of gradients and Hadamard
    transforms: faster, noisier, and not reproducible to the bit."""
    modules: list[Literal["attention", "mlp", "experts"]] = ["attention", "mlp", "experts"]
    """Which linear layers are quantised: those of attention, those of dense MLPs and shared experts, those of routed experts.
    Embeddings, output layer, routers and norms never are."""
    exclude: list[str] = []
    """Modules that are not quantised, by their Hugging Face names or leading segments of them: "model.layers.0",
    "model.layers.*.self_attn". A segment may contain *, ? and [...]."""


class Checkpoint(Section):
    """When the run's state is saved, and what is kept of it."""

    every: Positive = 20
    """Steps between two checkpoints. One more is written at the end and on Ctrl-C."""
    keep: Positive = 2
    """Number of checkpoints that are kept."""
    spool_steps: NonNegative | None = None
    """Number of steps before the oldest kept checkpoint whose rollouts stay in the spool, to be inspected or trained again. None:
    all steps."""
    export: bool = True
    """Write a Hugging Face folder at the end of the run."""


class Metrics(Section):
    """Where metrics are written, and what is measured in addition."""

    tensorboard: bool = True
    """Write TensorBoard files into the run's folder."""
    wandb_project: str | None = None
    """Project of Weights & Biases that metrics are sent to. None: they are not sent."""
    examples_per_step: NonNegative = 2
    """Number of readable rollouts that are kept in the run's folder for each step."""
    entropy_full_tokens: NonNegative = 128
    """Number of loss tokens of each microbatch on which the entropy over the full vocabulary is measured."""


class RoleNodes(Section):
    """The nodes of one role, trainer or rollouts. What is None here is taken from [slurm]."""

    nodes: Positive = 1
    """Number of nodes."""
    gpus_per_node: NonNegative = 8
    """GPUs of a node that the run uses. 0: none, the run computes on CPUs."""
    partition: Word | None = None
    """sbatch's --partition. None: `slurm.partition`."""
    constraint: Word | None = None
    """Features that the nodes need, as sbatch's --constraint takes them. None: `slurm.constraint`."""
    environment: Annotated[dict[str, str], AfterValidator(_variable_names)] = {}
    """Environment variables of this role's processes, such as NCCL's. They take precedence over the program's own choice."""


class Slurm(Section):
    """What a run asks of a cluster. `megatron-rl launch` reads it; a run on one machine does not.

    A site keeps what does not change from run to run in one file with a [slurm] section: `launch --profile FILE`.
    """

    trainer: RoleNodes = RoleNodes()
    """The table [slurm.trainer]: the nodes of the trainer's ranks."""
    rollouts: RoleNodes = RoleNodes()
    """The table [slurm.rollouts]: the nodes of the servers."""
    partition: Word | None = None
    """sbatch's --partition. None: the site's default."""
    account: Word | None = None
    """sbatch's --account. None: the site's default."""
    qos: Word | None = None
    """sbatch's --qos. None: the site's default."""
    constraint: Word | None = None
    """sbatch's --constraint, for both roles. None: any node."""
    time_limit: (
        Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$", coerce_numbers_to_str=True), BeforeValidator(_time_as_text)]
        | None
    ) = None
    """sbatch's --time: minutes, hours:minutes:seconds or days-hours:minutes:seconds. None: the partition's limit."""
    signal_before_end_s: Positive = 600
    """Seconds before the time limit at which the job gets the signal to finish its step, save and requeue itself. They have to
    cover the longest step and the writing of a checkpoint."""
    requeue: bool = True
    """After the time limit, a preemption or a failure, continue in the next attempt of the same job."""
    max_attempts_without_checkpoint: Positive = 3
    """Number of consecutive attempts of the job that end without a further checkpoint, after which it is no longer requeued."""
    exclusive: bool = True
    """Ask for whole nodes."""
    request_gpus: bool = True
    """Ask for GPUs by --gpus-per-node. false: the site assigns GPUs together with the node."""
    arguments: list[Word] = []
    """Further arguments of sbatch for all components of the job, each as one word: "--reservation=name"."""
    prologue: str = ""
    """Shell lines that run on the job's first node before anything else: modules, exports. What they export reaches every
    process."""
    python: str | None = None
    """The Python interpreter on the nodes or in the container. None: the one that runs `megatron-rl launch`."""
    interface: str | None = None
    """The network interface that the processes of the run use to reach one another, such as "ib0". None: on the first node the
    interface of its host name, on the other nodes the interface towards it."""
    container_image: str | None = None
    """An image for pyxis and enroot. None: no container."""
    container_mounts: list[str] = []
    """SOURCE:TARGET, as pyxis takes them. The run's folder and the folder of the submission are always mounted."""
    join_timeout_s: Seconds = 600.0
    """Seconds in which all nodes have to join the run, the start of their containers included."""

    @property
    def time_limit_s(self) -> int | None:
        """The time limit in seconds; None where the partition's counts, as it does for sbatch's 0, no limit."""
        if self.time_limit is None:
            return None
        days, dash, clock = self.time_limit.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        # minutes, minutes:seconds, hours:minutes:seconds; after days, hours come first
        hours, minutes, seconds = [*parts, 0, 0][:3] if dash else ([0, *parts, 0] if len(parts) < 3 else parts)[:3]
        return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds or None
