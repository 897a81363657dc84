"""The CPU worker of a rollout server (`--worker-cls`): vLLM's own, which also remembers the policy version of every token.

The methods that a client may call through `/collective_rpc` are `version_spans` and `held_version`. With tensor
parallelism every rank answers, and all answers are the same.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_rl.inference.vllm.plugin.version_spans import VersionSpans
from megatron_rl.wire.weights import NO_VERSION


class RolloutCpuWorker(CPUWorker):
    """vLLM 0.30.0 returns no per-token version; on GPUs, from 0.32, the engine's own spans replace this class."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._version_spans = VersionSpans()

    def execute_model(self, scheduler_output: Any) -> Any:
        """One engine step, up to sampling."""
        self._version_spans.finish(scheduler_output.finished_req_ids)
        return self._recorded(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The sampling of an engine step, where vLLM runs it apart."""
        return self._recorded(super().sample_tokens(grammar_output))

    def _recorded(self, output: object) -> object:
        """Record what a step sampled. The runner returns it from one of two methods, the other gives None or an empty output."""
        if isinstance(output, ModelRunnerOutput) and output.sampled_token_ids:
            self._version_spans.record(output.req_ids, output.sampled_token_ids, self.held_version()["version"])
        return output

    def version_spans(self, request_ids: Sequence[str]) -> dict[str, list[list[int]]]:
        """The version spans of each client request id: [[first token, version], ...].

        A request that has no token yet is left out, and so is one that ended long ago. Asking changes nothing.
        """
        return {name: [list(span) for span in spans] for name, spans in self._version_spans.ask(request_ids).items()}

    def held_version(self) -> dict[str, int]:
        """The version of the last finished update; -1 before the first and while one is under way.

        A dictionary, because the route turns a bare integer into text.
        """
        return {"version": getattr(self.weight_transfer_engine, "held_version", NO_VERSION)}

    def start_weight_update(self) -> None:
        """Begin an update, also after an interrupted one: vLLM would refuse that, and has no way to leave the old one."""
        self._weight_update_active = False
        super().start_weight_update()
