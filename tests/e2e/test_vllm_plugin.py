"""Weight updates of one real vLLM server, compared with transformers' log-probs and, to the last bit, with the server's.

The server starts on dummy weights, as in a run. What this does not show: tensor parallelism, NCCL, a GPU.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.inference.engine import ServerSettings
from megatron_rl.inference.sender import ServerAddress
from megatron_rl.inference.vllm import gloo
from megatron_rl.inference.vllm.engine import VllmEngine
from megatron_rl.inference.vllm.gloo import GlooSender
from megatron_rl.inference.vllm.server import server_command
from megatron_rl.weight_sync import UpdateReport, update_servers
from megatron_rl.wire.access import with_key
from megatron_rl.wire.tensor_spec import TensorSpec

pytest.importorskip("vllm")
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

# vLLM and transformers compute in float32 in different orders; their log-probs differ by up to 2e-6 on these models.
SAME_MODEL = 1e-5
# Other weights move the log-prob of a token by about 1; the smallest of a few dozen tokens is seldom below 1e-3.
OTHER_MODEL = 1e-4

VOCABULARY = 500  # not a multiple of 64, and 48 not one of 32: vLLM pads the vocabulary and the experts
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    max_position_embeddings=512, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=True,
)  # fmt: skip


class Policy:
    """A random model, and its weights as a checkpoint names them."""

    def __init__(self, folder: Path, seed: int):
        torch.manual_seed(seed)
        self._model = Qwen3MoeForCausalLM(CONFIG).float().eval()
        for parameter in self._model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(3.0)  # at its initial scale, a random model is close to uniform under any weights
        self._model.save_pretrained(folder)
        self.tensors = load_file(folder / "model.safetensors")

    @torch.no_grad()
    def logprobs(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """float64 [len(completion)]: log-prob of each completion token, given all before it."""
        logits = self._model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
        return torch.log_softmax(logits, -1)[torch.arange(len(completion)), torch.tensor(completion)]


class Source:
    """A dictionary as a weight source."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    @property
    def specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, t) for name, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


@dataclass
class Completion:
    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor  # float64 [tokens]
    routes: str


KEY = "the run's key"


def quiet_port() -> int:
    """A free port below those that the kernel gives to clients: the server binds it only after seconds of imports."""
    while True:
        try:
            with socket.create_server(("127.0.0.1", random.randrange(20000, 32000))) as listener:
                return listener.getsockname()[1]
        except OSError:
            continue


class Server:
    """The server under test, driven by its HTTP routes."""

    def __init__(self, model_dir: Path, log: Path):
        port = quiet_port()
        # A token budget below the prompts together has prefill cut into chunks; the cache is too small for all requests at once.
        argv, env = server_command(
            ServerSettings(
                str(model_dir),
                "127.0.0.1",
                port,
                device="cpu",
                dtype="float32",
                max_sequence_length=512,
                max_num_seqs=6,
                keep_set_source="processed_logprobs",
                has_moe_layers=True,
                max_keep_set=8,
                weight_transport="gloo",
                key=KEY,
                seed=1,
                kv_cache_gib=0.01,
                extra_arguments=["--max-num-batched-tokens", "128"],
            )
        )
        self.log = log
        self.process = subprocess.Popen(argv, env=os.environ | env, stdout=log.open("w"), stderr=subprocess.STDOUT)
        self.address = ServerAddress("server-0", f"http://127.0.0.1:{port}")
        self._client = httpx.Client(base_url=self.address.url, timeout=300, headers=with_key(KEY))
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if self._client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"not up within 600 s:\n{self.log.read_text()[-3000:]}")

    def generate(self, prompt: list[int], num_tokens: int, request_id: str = "r") -> Completion:
        sampling = {"max_tokens": num_tokens, "temperature": 1.0, "logprobs": 1, "ignore_eos": True}
        body = {"request_id": request_id, "token_ids": prompt, "sampling_params": sampling}
        reply = self._client.post("/inference/v1/generate", json=body).raise_for_status()
        (choice,) = reply.json()["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return Completion(prompt, choice["token_ids"], torch.tensor(logprobs, dtype=torch.float64), choice["routed_experts"])

    def prompt_logprobs(self, prompt: list[int]) -> list[float]:
        """The server's log-prob of each prompt token after the first: every weight takes part, and nothing is sampled."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        reply = self._client.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling})
        rows = reply.raise_for_status().json()["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)]

    def ask_workers(self, method: str, *args: object) -> dict:
        reply = self._client.post("/collective_rpc", json={"method": method, "args": list(args)}).raise_for_status()
        return reply.json()["results"][0]

    def update(self, tensors: dict[str, torch.Tensor], version: int) -> UpdateReport:
        sender = GlooSender(bucket_bytes=1 << 16, timeout_s=60)
        return update_servers(VllmEngine(), sender, [self.address], Source(tensors), version, key=KEY)


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> list[Policy]:
    folder = tmp_path_factory.mktemp("policies")
    return [Policy(folder / str(seed), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def server(policies, tmp_path_factory) -> Iterator[Server]:
    model_dir = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(model_dir)  # no weights: the first update brings them
    server = Server(model_dir, tmp_path_factory.mktemp("log") / "server.log")
    yield server
    server.process.kill()
    server.process.wait()


PROMPT = list(range(20, 200, 3))


def assert_serves(server: Server, policy: Policy) -> None:
    completion = server.generate(PROMPT, 16)
    assert (completion.logprobs - policy.logprobs(PROMPT, completion.tokens)).abs().max() < SAME_MODEL


@pytest.fixture(scope="module")
def first_logprobs(server, policies) -> list[float]:
    """The server's prompt log-probs under the first policy's weights, right after the first update of all."""
    assert server.ask_workers("held_version") == {"version": -1}
    report = server.update(policies[0].tensors, 0)
    assert report.held == ("server-0",), report.failed
    return server.prompt_logprobs(PROMPT)


def test_an_update_brings_the_new_weights_and_nothing_else(server, policies, first_logprobs):
    for version, policy in enumerate((policies[0], policies[1], policies[0])):
        assert server.update(policy.tensors, version).held == ("server-0",)
        assert server.ask_workers("held_version") == {"version": version}
        assert_serves(server, policy)
    assert server.prompt_logprobs(PROMPT) == first_logprobs  # after the detour, to the last bit


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def without(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: without(EXPERT, t), "model.layers.1.mlp.experts.routed_experts.3.up_proj was not sent"),
        (lambda t: without("model.layers.0.self_attn.k_proj.weight", t), "model.layers.0.self_attn.qkv_proj got "),
        (lambda t: without("model.norm.weight", t), "model.norm got nothing"),
        (lambda t: t | {"model.layers.0.surplus.weight": torch.zeros(3)}, "'model.layers.0.surplus.weight' was refused"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}, "it ignores a tensor of this name"),
        (lambda t: t | {"model.norm.weight": torch.zeros(3)}, "'model.norm.weight' was refused"),
    ],
    ids=["expert missing", "part of qkv missing", "norm missing", "unknown", "ignored", "wrong shape"],
)
def test_a_wrong_update_is_refused_by_name(server, policies, first_logprobs, change, reason):
    report = server.update(change(policies[1].tensors), 5)
    assert report.held == () and reason in report.failed["server-0"]
    assert server.ask_workers("held_version") == {"version": -1}
    assert server.update(policies[0].tensors, 6).held == ("server-0",)
    assert server.prompt_logprobs(PROMPT) == first_logprobs


def test_a_flipped_bit_is_refused_by_name(server, policies, first_logprobs, monkeypatch):
    def pack_with_damage(bucket, tensors, buffer):
        pack_bucket(bucket, tensors, buffer)
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
            if spec.name == EXPERT:
                buffer[offset + 1001] ^= 1

    pack_bucket = gloo.pack_bucket
    monkeypatch.setattr(gloo, "pack_bucket", pack_with_damage)
    report = server.update(policies[1].tensors, 5)
    assert report.held == () and f"checksum mismatch in ['{EXPERT}']" in report.failed["server-0"]
    monkeypatch.undo()
    assert server.update(policies[0].tensors, 6).held == ("server-0",)
    assert server.prompt_logprobs(PROMPT) == first_logprobs


BROKEN_OFF = """
import os, signal, sys
import torch
from megatron_rl.inference.sender import ServerAddress
from megatron_rl.inference.vllm.engine import VllmEngine
from megatron_rl.inference.vllm.gloo import GlooSender
from megatron_rl.weight_sync import update_servers
from megatron_rl.wire.tensor_spec import TensorSpec
from safetensors.torch import load_file

class Dying:
    tensors = load_file(sys.argv[2])
    specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
    def __iter__(self):
        for index, item in enumerate(self.tensors.items()):
            if index == len(self.tensors) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

server = ServerAddress("server-0", sys.argv[1])
update_servers(VllmEngine(), GlooSender(bucket_bytes=1 << 14), [server], Dying(), 5, key="the run's key")
"""


def test_an_update_whose_sender_is_killed_can_be_made_again(server, policies, first_logprobs, tmp_path_factory):
    weights = tmp_path_factory.getbasetemp() / "policies0" / "1" / "model.safetensors"
    sender = subprocess.run([sys.executable, "-c", BROKEN_OFF, server.address.url, str(weights)], check=False)
    assert sender.returncode == -signal.SIGKILL
    assert server.ask_workers("held_version") == {"version": -1}  # an answer: the server has left the stream
    assert server.update(policies[0].tensors, 6).held == ("server-0",)
    assert server.prompt_logprobs(PROMPT) == first_logprobs


def test_spans_of_requests_in_flight(server, policies, first_logprobs):
    """More requests than run at once or fit the cache, prompts prefilled in chunks, two updates on the way."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCABULARY, (10 + 15 * i,), generator=generator).tolist() for i in range(10)]
    server.update(policies[0].tensors, 10)
    with ThreadPoolExecutor(len(prompts)) as pool:
        pending = [pool.submit(server.generate, prompt, 200, f"flight-{i}") for i, prompt in enumerate(prompts)]
        for version in (11, 12):
            wait_for_tokens(server, pending, version - 1)
            assert server.update(policies[version - 10].tensors, version).held == ("server-0",)
        completions = [future.result() for future in pending]
    answer = server.ask_workers("version_spans", [f"flight-{i}" for i in range(len(prompts))])
    boundaries = sum(
        assert_sampled_as_told(completion, answer[f"flight-{i}"], policies) for i, completion in enumerate(completions)
    )
    assert boundaries >= 6  # the three or more that ran at each update span it


def wait_for_tokens(server: Server, pending: list[Future], version: int) -> None:
    """Until three requests have a token of this version."""
    while not any(future.done() for future in pending):
        spans = server.ask_workers("version_spans", [f"flight-{i}" for i in range(len(pending))])
        if sum(any(held == version for _, held in history) for history in spans.values()) >= 3:
            return
        time.sleep(0.02)
    raise AssertionError("a request ended before the update; give the requests more tokens")


def assert_sampled_as_told(completion: Completion, spans: list[list[int]], policies: list[Policy]) -> int:
    """Every token has the log-prob of the version that the spans name, and at a boundary not that of the version beyond it.

    Returns the number of boundaries.
    """
    under = torch.stack([policy.logprobs(completion.prompt, completion.tokens) for policy in policies])  # [versions, tokens]
    versions = torch.full((len(completion.tokens),), -1)
    for start, version in spans:
        versions[start:] = version - 10
    own = under[versions, torch.arange(len(completion.tokens))]
    assert (own - completion.logprobs).abs().max() < SAME_MODEL
    for start, _ in spans[1:]:
        beyond = [under[versions[start - 1], start] - completion.logprobs[start]]
        beyond += [under[versions[start], start - 1] - completion.logprobs[start - 1]]
        assert max(abs(float(difference)) for difference in beyond) > OTHER_MODEL
    return len(spans) - 1


def test_no_process_is_left_when_the_server_is_killed(server):
    """The last test of this module: it ends the server."""
    engine = psutil.Process(server.process.pid).children(recursive=True)
    assert engine
    server.process.kill()
    _, alive = psutil.wait_procs(engine, timeout=20)
    assert not alive
