"""The servers' command line."""

import sys

import pytest

from megatron_rl.inference.engine import ServerPart, ServerSettings
from megatron_rl.inference.vllm.server import server_command

CPU = {
    "device": "cpu",
    "dtype": "float32",
    "max_sequence_length": 512,
    "max_num_seqs": 16,
    "keep_set_source": "processed_logprobs",
    "has_moe_layers": True,
    "max_keep_set": 40,
    "weight_transport": "gloo",
    "key": "secret-key",
    "seed": 7,
    "kv_cache_gib": 0.5,
}
GPU = CPU | {"device": "cuda", "weight_transport": "nccl", "kv_cache_gib": None, "gpu_memory_utilization": 0.85}


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_cpu_server():
    argv, env = server_command(ServerSettings("/models/tiny", "127.0.0.1", 8123, **CPU))
    assert argv[:3] == [sys.executable, "-m", "megatron_rl.inference.vllm.plugin.serve"]
    expected = {
        "--model": "/models/tiny",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--dtype": "float32",
        "--seed": "7",
        "--load-format": "dummy",
        "--max-model-len": "512",
        "--max-num-seqs": "16",
        "--max-logprobs": "40",
        "--logprobs-mode": "processed_logprobs",
        "--kv-cache-memory-bytes": str(1 << 29),
        "--generation-config": "vllm",
        "--weight-transfer-config": '{"backend": "gloo"}',
        "--worker-cls": "megatron_rl.inference.vllm.plugin.worker.RolloutCpuWorker",
    }
    assert {name: option(argv, name) for name in expected} == expected
    assert {"--enable-return-routed-experts", "--enable-scale-out", "--skip-tokenizer-init", "--enforce-eager"} <= set(argv)
    assert "--return-sampling-mask" not in argv and "--gpu-memory-utilization" not in argv
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env and "MEGATRON_RL_SERVER_CPUS" not in env


def test_gpu_server_with_native_keep_sets():
    argv, env = server_command(
        ServerSettings("/models/big", "10.0.0.5", 8123, **GPU | {"keep_set_source": "native", "tensor_parallel_size": 4})
    )
    assert "--return-sampling-mask" in argv and option(argv, "--gpu-memory-utilization") == "0.85"
    assert option(argv, "--tensor-parallel-size") == "4" and option(argv, "--weight-transfer-config") == '{"backend": "nccl"}'
    assert "--enforce-eager" not in argv and "--worker-cls" not in argv and "--kv-cache-memory-bytes" not in argv
    assert "OMP_NUM_THREADS" not in env


def test_a_dense_model_has_no_routes_to_return():
    argv, _ = server_command(ServerSettings("m", "127.0.0.1", 1, **GPU | {"has_moe_layers": False}))
    assert "--enable-return-routed-experts" not in argv


def test_without_truncation_there_is_no_mask_to_return():
    argv, _ = server_command(ServerSettings("m", "127.0.0.1", 1, **GPU | {"keep_set_source": None}))
    assert "--return-sampling-mask" not in argv


def test_cores_of_a_cpu_server():
    _, env = server_command(ServerSettings("m", "127.0.0.1", 1, **CPU, cpus=[2, 3], threads=2))
    assert env["MEGATRON_RL_SERVER_CPUS"] == "2,3" and env["OMP_NUM_THREADS"] == "2"
    _, env = server_command(ServerSettings("m", "127.0.0.1", 1, **CPU, cpus=[4, 5, 6, 7], threads=2, tensor_parallel_size=2))
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"


def test_extra_arguments_come_last_and_so_have_the_last_word():
    argv, _ = server_command(ServerSettings("m", "127.0.0.1", 1, **CPU, extra_arguments=["--max-num-seqs", "3"]))
    assert argv[-2:] == ["--max-num-seqs", "3"]


def test_a_server_that_spans_nodes_is_a_head_and_workers_that_know_where_it_is():
    commands = [
        server_command(
            ServerSettings(
                "/models/big", f"10.0.0.{index}", 8123, **GPU, tensor_parallel_size=8, part=ServerPart(index, 2, "10.0.0.0", 4000)
            )
        )
        for index in range(2)
    ]
    for index, (argv, _) in enumerate(commands):
        place = {"--nnodes": "2", "--node-rank": str(index), "--master-addr": "10.0.0.0", "--master-port": "4000"}
        assert {name: option(argv, name) for name in place} == place
        assert option(argv, "--distributed-executor-backend") == "mp" and option(argv, "--tensor-parallel-size") == "8"
        assert ("--headless" in argv) == (index > 0)
    head, other = (argv for argv, _ in commands)
    of_their_own = {"10.0.0.0", "10.0.0.1", "0", "1", "--headless"}
    assert [word for word in head if word not in of_their_own] == [word for word in other if word not in of_their_own]
    alone, _ = server_command(ServerSettings("/models/big", "10.0.0.5", 8123, **GPU, tensor_parallel_size=8))
    assert "--nnodes" not in alone and "--distributed-executor-backend" not in alone


def test_a_part_with_one_worker_keeps_its_cores():
    _, env = server_command(
        ServerSettings("m", "127.0.0.1", 1, **CPU, threads=2, tensor_parallel_size=2, part=ServerPart(1, 2, "127.0.0.1", 2))
    )
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and env["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_transport": "carrier pigeon"}, "'carrier pigeon'"),
        ({"kv_cache_gib": None}, "neither kv_cache_gib nor gpu_memory_utilization"),
        ({"tensor_parallel_size": 2}, "a node has 2 workers of a server .* and cpus is None"),
        ({"tensor_parallel_size": 4, "part": ServerPart(0, 2, "10.0.0.5", 4000)}, "a node has 2 workers of a server"),
        (
            {"tensor_parallel_size": 3, "part": ServerPart(0, 2, "10.0.0.5", 4000)},
            "the 3 workers of a server .* servers.nodes = 2",
        ),
        (
            {"tensor_parallel_size": 2, "part": ServerPart(0, 2, "h", 1), "extra_arguments": ["-dp", "2"]},
            "servers.nodes = 2 with 2 data-parallel replicas",
        ),
        ({"extra_arguments": ["--enable_expert_parallel"]}, "that some are on other workers, and crashes"),
        ({"extra_arguments": ["--nnodes=2", "--node_rank", "1"]}, "has --nnodes=2, --node_rank: .* set servers.nodes"),
        ({"extra_arguments": ["--port=9", "--model", "x"]}, "has --port=9, --model: .* set servers.host, servers.first_port"),
        ({"tensor_parallel_size": 2, "cpus": [1]}, "at least 2"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        server_command(ServerSettings("m", "127.0.0.1", 1, **CPU | changes))


@pytest.mark.parametrize("word", ["--data-parallel-external-lb", "-dpn", "--data-parallel-rank=1", "--data_parallel_hybrid_lb"])
def test_a_server_of_several_addresses_is_refused(word):
    """The weight group would count replicas that its address does not reach, and wait for them without end."""
    with pytest.raises(ValueError, match=f"servers.extra_arguments has {word}"):
        server_command(ServerSettings("m", "127.0.0.1", 1, **CPU, extra_arguments=["--data-parallel-size", "2", word]))
    server_command(ServerSettings("m", "127.0.0.1", 1, **CPU, extra_arguments=["--data-parallel-size", "2"]))


def test_the_key_is_in_the_environment_and_not_on_the_command_line():
    argv, env = server_command(ServerSettings("m", "127.0.0.1", 1, **CPU))
    assert env["MEGATRON_RL_KEY"] == "secret-key" and not any("secret-key" in word for word in argv)
    assert option(argv, "--middleware") == "megatron_rl.inference.vllm.plugin.access.RequireKey"
