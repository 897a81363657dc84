"""The trainer's side of a weight update: rank 0 streams new weights to every rollout server, as one transaction.

    pause all -> start -> stream -> finish(version) -> does each hold it? -> reset the prefix cache -> resume

What is sent (`WeightSource`) is apart from how it is sent (`GlooSender`, `NcclSender`) and from the order of things
(`update_servers`). The receivers are vLLM's weight transfer engines; the `gloo` one is `megatron_rl.inference.vllm.plugin`'s.
"""

from megatron_rl.inference.sender import WeightSender, WeightSource, checked_tensors
from megatron_rl.inference.vllm.control import ServerAddress, ServerError, ServerRoutes
from megatron_rl.inference.vllm.gloo import GlooSender
from megatron_rl.inference.vllm.nccl import NcclSender
from megatron_rl.weight_sync.transaction import UpdateReport, update_servers

__all__ = [
    "GlooSender",
    "NcclSender",
    "ServerAddress",
    "ServerError",
    "ServerRoutes",
    "UpdateReport",
    "WeightSender",
    "WeightSource",
    "checked_tensors",
    "update_servers",
]
