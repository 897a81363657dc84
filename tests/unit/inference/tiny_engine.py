"""An inference engine of a few lines, to show that `inference.engine` is all that a run needs of one. Nothing here knows vLLM."""

import sys

import httpx
import numpy as np

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import checked_tensors
from megatron_rl.records import RaggedIds
from megatron_rl.wire.access import KEY_VARIABLE, with_key


class TinyEngine:
    """See `megatron_rl.inference.engine.InferenceEngine`."""

    name = "tiny"
    keep_set_sources = frozenset(["native"])

    def weight_transports(self, device):
        return frozenset(["gloo"])

    def server_command(self, settings):
        argv = [sys.executable, "-m", "tests.unit.inference.tiny_server", settings.host, str(settings.port)]
        return argv, {KEY_VARIABLE: settings.key}

    def devices_per_server(self, tensor_parallel_size, extra_arguments, num_nodes=1):
        return tensor_parallel_size

    def cluster_environment(self, address):
        return {}

    async def check_health(self, http, url):
        (await http.get(f"{url}/health")).raise_for_status()

    def why_not_comparable(self, architecture):
        return "it has no model"

    def sampling_client(self, url, contract, *, key, keep_set_source, max_keep_set, timeout_s):
        assert keep_set_source == "native"
        return TinyClient(url, contract, key, timeout_s)

    def server_control(self, address, http, timeout_s):
        return TinyControl(address, http, timeout_s)

    def weight_sender(self, transport, host, *, bucket_bytes, timeout_s):
        assert transport == "gloo"
        return TinySender()


class TinyClient:
    """Every token's keep-set is the token and its successor, equally likely."""

    def __init__(self, url, contract, key, timeout_s):
        self.url, self.contract = url, contract
        self.http = httpx.AsyncClient(base_url=url, headers=with_key(key), timeout=timeout_s, trust_env=False)

    async def generate(self, prompt_ids, sampling, request_id, stop_token_ids=()):
        c = self.contract
        try:
            reply = await self.http.post("/sample", json={"most": sampling.max_new_tokens, "vocab_size": c.vocab_size})
        except httpx.HTTPError as error:
            raise ServerError(self.url, "POST /sample", str(error)) from error
        ids, rng = np.array(reply.json()["ids"], dtype=np.int32), np.random.default_rng(len(request_id))
        experts = rng.random((len(prompt_ids) + len(ids) - 1, c.num_moe_layers, c.num_experts)).argsort(axis=-1)
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), np.log(0.5), dtype=np.float32),
            keep_sets=RaggedIds.of([[i, (i + 1) % c.vocab_size] for i in ids]),
            routed_experts=experts[..., : c.experts_per_token].astype(np.uint8),
            policy_versions=np.full(len(ids), reply.json()["version"], dtype=np.int32),
            finish_reason="length",
        )

    async def close(self):
        await self.http.aclose()


class TinyControl:
    def __init__(self, address, http, timeout_s):
        self.address, self.http, self.timeout_s = address, http, timeout_s

    def post(self, path, **body):
        try:
            return self.http.post(self.address.url + path, json=body, timeout=self.timeout_s).raise_for_status().json()
        except httpx.HTTPError as error:
            raise ServerError(self.address.name, f"POST {path}", str(error)) from error

    def pause(self):
        self.post("/pause")

    def start_update(self):
        self.post("/start_update")

    def receive(self, announcement):
        self.post("/receive", **announcement)

    def finish_update(self, version):
        self.post("/finish_update", version=version)

    def reset_prefix_cache(self):
        self.post("/reset_prefix_cache")

    def resume(self):
        self.post("/resume")


class TinySender:
    def connect(self, servers):
        self.servers = list(servers)
        return {}

    def announcement(self, specs, version):
        return {"names": [spec.name for spec in specs]}

    def stream(self, source):
        for spec, tensor in checked_tensors(source):
            for server in self.servers:
                server.post("/load", name=spec.name, sum=float(tensor.sum()))
        return {}

    def confirm(self, server, version):
        if (held := server.post("/state")["version"]) != version:
            raise ServerError(server.address.name, "POST /state", f"holds version {held} after the update to {version}")

    def disconnect(self, server): ...

    def close(self): ...
