"""Which vLLM the plugin knows. It leans on internals that vLLM may change without notice, so an unknown version is an error."""

from collections.abc import Sequence

KNOWN_VERSIONS = ("0.30.0",)
"""Versions against whose source the reload and the expert mend were written, and with which the end-to-end test ran."""


class UnknownVllmError(RuntimeError):
    """The installed vLLM is not one that the plugin was checked against."""


def require_known_vllm(installed: str, known: Sequence[str] = KNOWN_VERSIONS) -> None:
    """`installed` is `vllm.__version__`, which may carry a local part such as `+cpu`."""
    if installed.split("+")[0] not in known:
        raise UnknownVllmError(
            f"vLLM {installed} is installed; the gloo weight transfer engine knows {', '.join(known)}. It replaces weights "
            "through vLLM's layerwise reload, whose internals differ between versions: install a known version, or read "
            "megatron_rl/inference/vllm/plugin/reload.py against the new source, run tests/e2e/test_vllm_plugin.py and add it to the list"
        )
