import pytest

from megatron_rl.inference.vllm.plugin.versions import KNOWN_VERSIONS, UnknownVllmError, require_known_vllm


def test_known_versions_pass():
    for version in KNOWN_VERSIONS:
        require_known_vllm(version)
        require_known_vllm(version + "+cpu")


def test_an_unknown_version_is_named():
    with pytest.raises(UnknownVllmError, match=r"vLLM 0\.99\.1 is installed; .* knows 0\.30\.0, 0\.31\.0"):
        require_known_vllm("0.99.1", known=("0.30.0", "0.31.0"))
