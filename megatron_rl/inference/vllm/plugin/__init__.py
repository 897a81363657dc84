"""All that runs inside vLLM's processes: the Gloo weight transfer engine, the fixes it needs, and the rollout worker.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It must stay cheap and must not touch
what a server without `--weight-transfer-config '{"backend": "gloo"}'` uses: the engine's module is imported, and the version of
vLLM checked, when such a server builds its engine.
"""

from megatron_rl.inference.vllm.plugin.lifetime import follow_the_server


def register() -> None:
    """Make `gloo` known as a weight transfer backend, and tie a rollout server's processes together."""
    follow_the_server()

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "gloo" not in WeightTransferEngineFactory._registry:  # vLLM may call this twice in a process that it forks
        WeightTransferEngineFactory.register_engine(
            "gloo", "megatron_rl.inference.vllm.plugin.engine", "GlooWeightTransferEngine"
        )
