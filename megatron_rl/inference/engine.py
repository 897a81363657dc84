"""The contract between a run and its inference engine, in plain words. vLLM (`inference/vllm/`) is its one implementation.

Which process of a run uses which part:

    orchestrator   starts the servers, asks for their health           server_command, cluster_environment, check_health
    worker         samples completions                                 sampling_client -> SamplingClient
    trainer        streams new weights to all servers at once          weight_sender -> WeightSender
    (rank 0)       in the order that `weight_sync` gives               server_control -> ServerControl

Another engine is a folder next to `inference/vllm/` with an implementation of `InferenceEngine`, and one entry in
`inference/registry.py`. Orchestrator and workers load no torch, so what needs torch is imported inside `weight_sender`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import httpx

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.sender import ServerAddress, ServerControl, WeightSender
from megatron_rl.records import ModelContract, Sampling

if TYPE_CHECKING:
    from megatron_rl.weight_mapping import ModelArchitecture

KeepSetSource = Literal["native", "processed_logprobs"]
"""How keep-sets are read from an answer. native: the engine returns the ids that survived truncation. processed_logprobs: they
are the tokens with a finite log-prob among the top ones of the truncated distribution."""

WeightTransport = Literal["gloo", "nccl"]
"""How weights travel from trainer rank 0 to the servers."""


@dataclass(frozen=True)
class ServerPart:
    """One process of a server that spans nodes, where each node has one. Part 0 is the head, which alone answers requests."""

    index: int
    count: int
    """Of all parts."""
    head_address: str
    """Of the head's node, as the other nodes reach it."""
    head_port: int
    """Of the head's node: where the parts meet. Another one than requests come to."""


@dataclass(frozen=True)
class ServerSettings:
    """What a run asks of one inference server, in no engine's words."""

    model_folder: str
    """Hugging Face folder. With load_format "dummy" only its config.json is read; the first weight update brings the weights."""
    host: str
    """The one address that the server listens on."""
    port: int
    device: Literal["cpu", "cuda"]
    dtype: str
    max_sequence_length: int
    """Prompt and generated tokens."""
    max_num_seqs: int
    """Sequences that the server generates at once."""
    keep_set_source: KeepSetSource | None
    """How keep-sets are read from the server's answers; None: nothing is truncated, so no answer has keep-sets."""
    has_moe_layers: bool
    """Whether the model has layers with experts. Only then the server returns routes."""
    max_keep_set: int
    """Size of the widest keep-set that `processed_logprobs` has to carry."""
    weight_transport: WeightTransport
    key: str = field(repr=False)
    """The run's. Without it the server answers nothing but a health check. It travels in the environment, which is private."""
    seed: int
    """Must differ between the servers of a run and between the starts of one server, or they sample equal tokens."""
    tensor_parallel_size: int = 1
    part: ServerPart | None = None
    """Of a server that spans nodes, the process that is started. None: the server is one process."""
    kv_cache_gib: float | None = None
    """Size of the KV cache; None: it takes what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float | None = None
    """Share of the device's (on a CPU, of the machine's) memory, from 0 to 1."""
    load_format: str = "dummy"
    cpus: Sequence[int] | None = None
    """Cores that a CPU server may use; needed there for several workers on one node. None: any."""
    threads: int = 1
    """CPU threads of each worker of the server."""
    extra_arguments: Sequence[str] = ()
    """Appended to the engine's command line as they are, so they have the last word."""


class SamplingClient(Protocol):
    """Samples from one server; used from one event loop."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Sample one completion.

        Args:
            prompt_ids: Token ids, [num_prompt_tokens].
            sampling: Temperature, truncation and the limit of new tokens.
            request_id: Unique among all requests to this server.
            stop_token_ids: The completion ends with the first of these, which is part of it.

        Returns:
            The tokens with log-probs, keep-sets, routes and policy versions. Each token's version is that of the weights that
            sampled it, also where the weights changed within the completion.

        Raises:
            ServerError: The server has exited, hangs or answers with an error.
            PromptError: The server refuses the request; another server would refuse it, too.
            ContractError: The answer is not a complete record.
        """
        ...

    async def close(self) -> None:
        """Release the connections."""
        ...


class InferenceEngine(Protocol):
    """What an engine offers a run. An implementation holds no state of a run: it makes the objects that do."""

    @property
    def name(self) -> str:
        """The engine's name in `servers.engine`."""
        ...

    @property
    def keep_set_sources(self) -> frozenset[KeepSetSource]:
        """The ways to read keep-sets from this engine's answers."""
        ...

    def weight_transports(self, device: Literal["cpu", "cuda"]) -> frozenset[WeightTransport]:
        """The transports that this engine's servers can receive weights over, on such a device."""
        ...

    def server_command(self, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
        """How one server, or one part of it, is started: argv, and the variables to add to the environment. Pure.

        A server that spans nodes is up when its head answers, and is stopped as a whole once any part of it has ended.

        Raises:
            UnsupportedByEngineError: The engine cannot run a server with these settings.
        """
        ...

    def devices_per_server(self, tensor_parallel_size: int, extra_arguments: Sequence[str], num_nodes: int = 1) -> int:
        """GPUs that one server uses, where the user's `extra_arguments` may spread it further than tensor parallelism does. Pure.

        Raises:
            UnsupportedByEngineError: The arguments cannot be read, or no such server can span `num_nodes` in equal parts.
        """
        ...

    def cluster_environment(self, address: str) -> Mapping[str, str]:
        """Variables of a server on a machine of several, whose own address in the run is `address`."""
        ...

    async def check_health(self, http: httpx.AsyncClient, url: str) -> None:
        """Return if the server at `url` is healthy. The caller bounds the time.

        Raises:
            httpx.HTTPError: It cannot be reached, or answers that it is not.
            ServerError: The same, for an engine that is not asked over HTTP.
        """
        ...

    def why_not_comparable(self, architecture: "ModelArchitecture") -> str | None:
        """Why no CPU server on this machine can be compared with the trainer in fp32 for such a model; None where one can."""
        ...

    def sampling_client(
        self, url: str, contract: ModelContract, *, key: str, keep_set_source: KeepSetSource, max_keep_set: int, timeout_s: float
    ) -> SamplingClient:
        """A client of the server at `url`.

        Args:
            url: Such as `http://127.0.0.1:8000`.
            contract: What the model's records look like.
            key: The run's.
            keep_set_source: How keep-sets are read.
            max_keep_set: Size of the widest keep-set that `processed_logprobs` carries.
            timeout_s: Timeout of one request, from sending to the complete answer.
        """
        ...

    def server_control(self, address: ServerAddress, http: httpx.Client, timeout_s: float) -> ServerControl:
        """The calls to one server during weight updates.

        Args:
            address: The server.
            http: Carries the run's key; shared by the controls of all servers.
            timeout_s: For every call but `receive`, which lasts as long as the stream does.
        """
        ...

    def weight_sender(self, transport: WeightTransport, host: str, *, bucket_bytes: int, timeout_s: float) -> WeightSender:
        """The sending end of a transport, for trainer rank 0.

        Args:
            transport: One of `weight_transports`.
            host: This machine's address, as the servers reach it.
            bucket_bytes: Tensors are sent together up to this size.
            timeout_s: The longest that a server may hold up the others.
        """
        ...
