"""NVFP4 on a GPU: Transformer Engine's kernel gives the bytes that servers get. Needs a Blackwell GPU."""

import pytest
import torch

from megatron_rl.precision import difference_of

pytest.importorskip("transformer_engine")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0),
    reason="FP4 kernels need compute capability 10.0",
)


def test_transformer_engines_kernel_gives_the_same_bytes() -> None:
    from megatron_rl.engine.te_fp4 import TransformerEngineQuantiser

    assert difference_of(TransformerEngineQuantiser(), torch.device("cuda")) is None
