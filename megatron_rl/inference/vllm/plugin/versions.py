"""Which vLLM the plugin knows. It uses internals that vLLM may change without notice, so an unknown version is an error."""

from collections.abc import Sequence

from megatron_rl.errors import UserError

KNOWN_VERSIONS = ("0.30.0",)
"""Versions whose source the reload and the fix for packed experts were written for, and that the end-to-end test ran with."""


class UnknownVllmError(UserError):
    """The installed vLLM is not one that the plugin was checked against."""


def require_known_vllm(installed: str, known: Sequence[str] = KNOWN_VERSIONS) -> None:
    """Check the installed version.

    Args:
        installed: `vllm.__version__`, which may have a local part such as `+cpu`.
        known: Versions to accept.

    Raises:
        UnknownVllmError: It is none of these.
    """
    if installed.split("+", maxsplit=1)[0] not in known:
        raise UnknownVllmError(
            f"vLLM {installed} is installed; the gloo weight transfer engine knows {', '.join(known)}. It replaces weights "
            "through vLLM's layerwise reload, whose internals differ between versions. Install a known version; or compare "
            "megatron_rl/inference/vllm/plugin/reload.py with the new source, run tests/e2e/test_vllm_plugin.py and add the "
            "version to KNOWN_VERSIONS"
        )
