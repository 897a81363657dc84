"""Which inference engines there are. The only module that names the folder of one."""

from collections.abc import Callable

from megatron_rl.config import Config
from megatron_rl.inference.engine import InferenceEngine
from megatron_rl.inference.errors import UnsupportedByEngineError


def _vllm() -> InferenceEngine:
    from megatron_rl.inference.vllm.engine import VllmEngine

    return VllmEngine()


ENGINES: dict[str, Callable[[], InferenceEngine]] = {"vllm": _vllm}
"""Name, as in `servers.engine`, to what makes the engine; an engine's code is imported when it is chosen."""


def engine_of(config: Config) -> InferenceEngine:
    """The run's inference engine.

    Raises:
        UnsupportedByEngineError: `servers.engine` is not registered, or lacks the run's keep-set source or weight transport.
    """
    make = ENGINES.get(config.servers.engine)
    if make is None:
        raise UnsupportedByEngineError(f"servers.engine = {config.servers.engine!r}; choose one of {', '.join(sorted(ENGINES))}")
    engine = make()
    for key, value, offered in (
        ("rollouts.keep_set_source", config.keep_set_source, engine.keep_set_sources),
        ("weight_sync.transport", config.transport, engine.weight_transports(config.device)),
    ):
        if value not in offered:
            raise UnsupportedByEngineError(
                f"{key} = {value!r}: {engine.name} offers {', '.join(sorted(offered))} with run.device = {config.device!r}; "
                "choose one of these"
            )
    return engine
