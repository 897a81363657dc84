"""What this program relies on, found by running it: its servers' command lines, its requests, its imports of the libraries."""

import ast
import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx

from megatron_rl.inference.engine import ServerPart, ServerSettings
from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import ServerAddress
from megatron_rl.inference.vllm.client import VllmClient
from megatron_rl.inference.vllm.control import VllmControl
from megatron_rl.inference.vllm.server import server_command
from megatron_rl.records import ModelContract, Sampling

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rl"
LIBRARIES = {
    "vllm": "vllm",
    "megatron": "megatron-core",
    "transformer_engine": "transformer-engine",
    "modelopt": "nvidia-modelopt",
    "emerging_optimizers": "emerging-optimizers",
}
"""Import name to package."""

CONTRACT = ModelContract(vocab_size=50, moe_layers=(1, 3), num_experts=8, experts_per_token=3)
SAMPLINGS = {
    "truncated": Sampling(temperature=0.7, top_p=0.9, top_k=4, max_new_tokens=9),
    "untruncated": Sampling(max_new_tokens=9),
}


SPANNING = ServerPart(index=0, count=4, head_address="10.0.0.1", head_port=4000)
"""A server of `SPANNING_GPUS` over nodes, as in model_configs/kimi-k2.toml: its head."""
SPANNING_GPUS = 32


def spanning_settings() -> Iterator[ServerSettings]:
    """All parts of a server that spans nodes."""
    whole = next(_settings_on_one_node())
    for index in range(SPANNING.count):
        yield replace(whole, tensor_parallel_size=SPANNING_GPUS, part=replace(SPANNING, index=index))


def server_settings() -> Iterator[ServerSettings]:
    """A GPU server in every way that the program starts one."""
    yield from _settings_on_one_node()
    yield from spanning_settings()


def _settings_on_one_node() -> Iterator[ServerSettings]:
    for has_moe_layers, source, utilization in product((True, False), ("native", "processed_logprobs", None), (None, 0.9)):
        yield ServerSettings(
            model_folder="/model", host="127.0.0.1", port=1, device="cuda", dtype="bfloat16", max_sequence_length=64,
            max_num_seqs=2,
            keep_set_source=source, has_moe_layers=has_moe_layers, max_keep_set=8, weight_transport="nccl", key="k", seed=1,
            kv_cache_gib=None if utilization else 1.0, gpu_memory_utilization=utilization,
        )  # fmt: skip


def server_flags() -> list[str]:
    """All options on the command lines of GPU servers."""
    return sorted({word for s in server_settings() for word in server_command(s)[0][3:] if word.startswith("--")})


def server_variables() -> list[str]:
    """vLLM's own variables in the environment of GPU servers."""
    return sorted({name for s in server_settings() for name in server_command(s)[1] if name.startswith("VLLM_")})


def sampling_requests() -> dict[str, dict[str, Any]]:
    """The body of /inference/v1/generate, by keep-set source and sampling."""
    asked: dict[str, dict[str, Any]] = {}

    async def ask(source: str, name: str) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            asked[f"{source}, {name}"] = json.loads(request.content)
            return httpx.Response(500)

        client = client_over(httpx.MockTransport(answer), source)
        with suppress(ServerError):  # that is the answer
            await client.generate([3, 1, 4], SAMPLINGS[name], "a", stop_token_ids=(7,))
        await client.close()

    for source, name in product(("native", "processed_logprobs"), SAMPLINGS):
        asyncio.run(ask(source, name))
    return asked


def client_over(transport: httpx.AsyncBaseTransport, source: Any, *, dense: bool = False) -> VllmClient:
    """The program's client, with a function in place of the network."""
    contract = ModelContract(CONTRACT.vocab_size, (), 0, 0) if dense else CONTRACT
    client = VllmClient("http://server", contract, key="k", keep_set_source=source, max_keep_set=16, timeout_s=5)
    client._http = httpx.AsyncClient(base_url="http://server", transport=transport)
    return client


def control_requests() -> dict[str, dict[str, Any]]:
    """What VllmControl sends: "POST /pause" to the names of the query's parameters and of the body's fields."""
    seen: dict[str, dict[str, Any]] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        url = request.url
        fields = sorted(json.loads(request.content)) if request.content else []
        seen[f"{request.method} {url.path}"] = {"query": dict(parse_qsl(url.query.decode())), "body": fields}
        return httpx.Response(200, json={"success": True, "weight_version": "1", "results": [], "world_size": 1})

    control = VllmControl(ServerAddress("s", "http://server"), httpx.Client(transport=httpx.MockTransport(answer)), 5.0)
    arguments = {"join_group": ({},), "receive": ({},), "finish_update": (1,), "call_workers": ("m",)}
    for name, method in vars(VllmControl).items():
        if callable(method) and not name.startswith("_"):
            getattr(control, name)(*arguments.get(name, ()))
    return dict(sorted(seen.items()))


def transformer_settings() -> list[str]:
    """Fields of Megatron's configuration that the engine sets: keywords and keys in the functions that make it."""
    found: set[str] = set()
    for file in sorted((PACKAGE / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.name.endswith("_settings") or node.name == "transformer_config"):
                found |= set(_keys(node))
    return sorted(found)


def _keys(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            yield from (k.value for k in node.keys if isinstance(k, ast.Constant))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.ctx, ast.Store):
            yield node.slice.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"dict", "kind"}:
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def imports() -> dict[str, list[str]]:
    """What the package imports from each library: "vllm.platforms: current_platform"."""
    found: dict[str, set[str]] = {package: set() for package in LIBRARIES.values()}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                if package := LIBRARIES.get(node.module.split(".")[0]):
                    found[package] |= {f"{node.module}: {alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if package := LIBRARIES.get(alias.name.split(".")[0]):
                        found[package].add(alias.name)
    return {package: sorted(names) for package, names in found.items()}
