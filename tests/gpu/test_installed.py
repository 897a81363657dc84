"""A GPU machine has the versions that the kept facts of tests/data/gpu_contracts.json are of. Skipped without a GPU."""

from importlib.metadata import version

import pytest
import torch

from tests.contracts.kept import FACTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_installed_versions_are_those_of_the_contracts():
    assert {name: version(name).partition("+")[0] for name in FACTS["versions"]} == FACTS["versions"]
