"""An answer of the real vLLM server on a GPU, decoded by the program's client. Skipped without a GPU."""

import asyncio

import httpx
import pytest
import torch

from megatron_rl.config.sections import Task as TaskSection
from megatron_rl.conversion import make_random_model
from megatron_rl.conversion.model_files import read_config
from megatron_rl.inference.engine import ServerSettings
from megatron_rl.inference.vllm.client import VllmClient
from megatron_rl.inference.vllm.server import server_command
from megatron_rl.processes import Child, Command, free_ports, stop_all
from megatron_rl.records import Sampling, check_rollout
from megatron_rl.rollouts.episode import EpisodeRules, run_episode
from megatron_rl.tasks import TextEncoder
from megatron_rl.weight_mapping import ParameterTable
from megatron_rl.wire.access import with_key
from tests.e2e.test_client_against_vllm import CONFIG, wait_until_healthy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KEY, VERSION = "k", 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "model"
    make_random_model(folder, CONFIG, seed=3)
    return folder


@pytest.fixture(scope="module")
def url(folder):
    port = free_ports(1)[0]
    settings = ServerSettings(
        model_folder=str(folder), host="127.0.0.1", port=port, device="cuda", dtype="bfloat16", max_sequence_length=256,
        max_num_seqs=32, load_format="auto", keep_set_source="native", has_moe_layers=True, max_keep_set=128,
        weight_transport="nccl", key=KEY, seed=5, kv_cache_gib=None, gpu_memory_utilization=0.3,
        extra_arguments=("--enforce-eager",),
    )  # fmt: skip
    argv, environment = server_command(settings)
    log = folder.parent / "server.log"
    server = Child(Command("server", argv, log, environment))
    try:
        wait_until_healthy(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop_all([server], grace_s=10)


def test_an_answer_has_keep_sets_routes_and_versions(url, folder, report):
    """`check_rollout` holds each token in its keep-set and each route among the experts."""
    httpx.post(f"{url}/update_weight_version", json={"new_version": str(VERSION)}, headers=with_key(KEY)).raise_for_status()
    text = TextEncoder(folder, TaskSection(name="chain_sum"))
    contract = ParameterTable(read_config(folder)).architecture.contract.limited_to(text.num_tokens)
    sampling = Sampling(top_p=0.9, top_k=40, max_new_tokens=12)

    async def sampled():
        client = VllmClient(url, contract, key=KEY, keep_set_source="native", max_keep_set=128, timeout_s=120)
        rules = EpisodeRules(sampling, text.eos_ids, max_sequence_length=256, max_turns=1)
        prompt = "1 + 2 ="
        try:
            return await run_episode("a", prompt, text.prompt(prompt), client, text, rules, None)
        finally:
            await client.close()

    rollout = asyncio.run(sampled())
    check_rollout(rollout, contract)
    generated = rollout.loss_mask.astype(bool)
    assert set(rollout.policy_versions[generated].tolist()) == {VERSION}
    report(tokens=float(generated.sum()))
