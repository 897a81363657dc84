"""What is read off nvidia-smi and CUDA_VISIBLE_DEVICES.

The answers are of the form that `nvidia-smi --help-query-gpu` documents: one line a GPU, values separated by ", ", memory in MiB
where nounits is given, "[N/A]" for what a GPU does not report. Not proved here: that a driver answers so.
"""

import pytest

from megatron_rl.processes import GpuQueryError, named_devices, query_gpus, usable_devices
from megatron_rl.processes.gpus import NVIDIA_SMI, parse_gpus, run_program

TWO = """0, NVIDIA B200, GPU-5a6c0a1e-0000-0000-0000-000000000000, 183359, 10.0, 580.82.07
1, NVIDIA H100 80GB HBM3, GPU-5a6c0a1e-0000-0000-0000-000000000001, 81559, 9.0, 580.82.07
"""


def test_gpus_are_read():
    first, second = parse_gpus(TWO)
    assert (first.index, first.name, first.memory_mib, first.driver) == ("0", "NVIDIA B200", 183359, "580.82.07")
    assert second.uuid.endswith("0001") and second.compute_capability == (9, 0)
    assert first.has_fp4 and not second.has_fp4


def test_memory_that_is_not_reported_is_unknown():
    (gpu,) = parse_gpus("0, NVIDIA GB10, GPU-1, [N/A], 12.1, 580.95.05\n")
    assert gpu.memory_mib is None and gpu.has_fp4


def test_no_gpu_is_an_empty_answer():
    assert parse_gpus("") == ()


def test_another_answer_is_named():
    with pytest.raises(GpuQueryError, match="No devices were found"):
        parse_gpus("No devices were found\n")


def test_the_query_is_the_one_that_is_parsed():
    asked = []
    query_gpus(lambda argv: asked.append(list(argv)) or TWO)
    assert asked == [list(NVIDIA_SMI)]
    assert NVIDIA_SMI[1] == "--query-gpu=index,name,uuid,memory.total,compute_cap,driver_version"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (["no-such-nvidia-smi"], "no-such-nvidia-smi is not in PATH"),
        (["sh", "-c", "echo NVIDIA-SMI has failed because; exit 9"], "ended with status 9: NVIDIA-SMI has failed because"),
    ],
)
def test_a_program_that_fails_is_named(program, expected):
    with pytest.raises(GpuQueryError, match=expected):
        run_program(program)


@pytest.mark.parametrize(
    ("variable", "devices"),
    [("", ()), ("0", ("0",)), ("4, 5", ("4", "5")), ("1,-1,2", ("1",)), ("GPU-5a,MIG-7", ("GPU-5a", "MIG-7"))],
)
def test_the_variable_is_read_as_cuda_reads_it(monkeypatch, variable, devices):
    """CUDA C++ Programming Guide, environment variables: what follows an invalid index is not seen."""
    assert named_devices(variable) == devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    listed = "".join(f"{n}, X, GPU-{n}, 1, 9.0, 580\n" for n in range(6))
    assert usable_devices(lambda argv: listed) == devices


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("0,0", "names 0 twice"),
        ("abc", "'abc' is neither a number nor a UUID"),
        ("²", "'²' is neither a number nor a UUID"),
        ("1,7", "names GPU 7, and nvidia-smi lists 0, 1"),
    ],
)
def test_a_variable_that_names_no_gpus_is_refused(monkeypatch, variable, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with pytest.raises(GpuQueryError, match=expected):
        usable_devices(lambda argv: TWO)


def test_the_variable_alone_counts_where_the_driver_does_not_answer(monkeypatch):
    def silent(argv):
        raise GpuQueryError("nvidia-smi does not answer")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert usable_devices(silent) == ("3",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(GpuQueryError, match="does not answer"):
        usable_devices(silent)


@pytest.mark.parametrize(("answer", "expected"), [(TWO + TWO, "more than once: 0, 1, 0, 1"), ("x" * 300_000, "cannot be read")])
def test_an_answer_that_cannot_be_is_refused(answer, expected):
    with pytest.raises(GpuQueryError, match=expected):
        parse_gpus(answer)


def test_output_that_is_not_utf_8_is_read():
    assert run_program(["printf", "a\\377b"]) == "a\ufffdb"


def test_without_the_variable_the_driver_is_asked(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert usable_devices(lambda argv: TWO) == ("0", "1")
