"""The Triton kernels on a machine without a GPU: their logic in Triton's interpreter, and that they compile for GPUs.

What it does not prove: that they are right and fast on hardware (tests/gpu, scripts/bench_keep_set.py --device cuda).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_their_logic_in_the_interpreter():
    """In a process of its own: Triton decides when it is imported whether its functions are interpreted, and much imports
    Triton."""
    root = Path(__file__).parents[3]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("interpreted_triton_kernels.py")),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    result = subprocess.run(command, check=False, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "11 passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("table", ["fp32", "bf16"])
def test_they_compile(capability, table):
    """To machine code, without a driver."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_rl.keep_set import triton_kernels as kernels

    pointers = {
        "left": f"*{table}",
        "table": f"*{table}",
        "index": "*i32",
        "bag": "*i64",
        "dots": "*fp32",
        "offsets": "*i32",
        "sums": "*fp32",
    }
    types = {**pointers, "coefficients": "*fp32", "num_pairs": "i32", "width": "i32"}
    constants = {"PAIRS": kernels._PAIRS, "COLUMNS": kernels._COLUMNS, "DTYPE": tl.float32}
    for kernel in (kernels._pair_dots, kernels._weighted_sums):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
