"""run.deterministic sets what NCCL, cuBLAS and Transformer Engine read when they start, and refuses an environment that says
otherwise."""

import os
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.engine.groups import set_determinism

WANTED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in WANTED:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


def test_everything_is_set_and_torch_refuses_the_rest() -> None:
    set_determinism(True)
    assert {name: os.environ[name] for name in WANTED} == WANTED
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_ALGO", "Tree"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")]
)
def test_an_environment_that_says_otherwise_is_refused(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}={value} .allowed: .*unset these variables"):
        set_determinism(True)


def test_a_run_that_is_not_deterministic_leaves_it_alone() -> None:
    set_determinism(False)
    assert not WANTED.keys() & os.environ.keys()
