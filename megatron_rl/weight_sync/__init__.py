"""The trainer's side of a weight update: rank 0 streams new weights to every rollout server, as one transaction.

    pause all -> start -> stream -> finish(version) -> does each hold it? -> reset the prefix cache -> resume

What is sent (`WeightSource`) is apart from how it is sent (`GlooSender`, `NcclSender`) and from the order of things
(`update_servers`). The receivers are vLLM's weight transfer engines; the `gloo` one is `megatron_rl.vllm_plugin`'s.
"""

from megatron_rl.weight_sync.gloo import GlooSender
from megatron_rl.weight_sync.nccl import NcclSender
from megatron_rl.weight_sync.routes import ServerAddress, ServerError, ServerRoutes
from megatron_rl.weight_sync.sender import WeightSender, WeightSource, checked_tensors
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
