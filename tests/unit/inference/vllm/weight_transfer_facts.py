"""What the NCCL sender relies on in a vLLM, read off its source without importing it."""

import ast
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

TRANSFER = "distributed/weight_transfer/"
PACKED = TRANSFER + "packed_tensor.py"
PYNCCL = "distributed/device_communicators/pynccl.py"


def download(version: str, folder: Path) -> Path:
    """The Python files of this vLLM's GPU wheel; some 340 MB are loaded for them."""
    command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-deps", "--only-binary=:all:", "-q"]
    command += ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "-d", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=900)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")])
    wheel.unlink()
    return folder / "vllm"


def facts_of(vllm: Path) -> dict:
    """Names, fields and parameters by what they belong to."""
    trees = {
        name: ast.parse((vllm / name).read_text())
        for name in (PACKED, PYNCCL, TRANSFER + "nccl_common.py", TRANSFER + "nccl_engine.py", "distributed/utils.py")
    }
    producer, pack = (_definition(trees[PACKED], name) for name in ("packed_nccl_broadcast_producer", "pack_tensors"))
    communicator = _definition(trees[PYNCCL], "PyNcclCommunicator")
    init_info = _definition(trees[TRANSFER + "nccl_common.py"], "NCCLWeightTransferInitInfo")
    engine = _definition(trees[TRANSFER + "nccl_engine.py"], "NCCLWeightTransferEngine")
    return {
        "routes": sorted(_routes(vllm)),
        "init_info": _fields(init_info),
        "update_info": _fields(_definition(trees[TRANSFER + "nccl_engine.py"], "NCCLWeightTransferUpdateInfo")),
        "producer": [argument.arg for argument in producer.args.args],
        "producer_sha256": hashlib.sha256((ast.unparse(producer) + ast.unparse(pack)).encode()).hexdigest(),
        "communicator": [argument.arg for argument in _definition(communicator, "__init__").args.args],
        "broadcast_is_silent_when_disabled": "if self.disabled:\n        return"
        in ast.unparse(_definition(communicator, "broadcast")),
        "metadata_group": _fields(_definition(trees["distributed/utils.py"], "StatelessProcessGroup")),
        "joining_destroys": "shutdown" in ast.unparse(_definition(engine, "init_transfer_engine")),
        "shutdown_destroys": ".destroy()" in ast.unparse(_definition(engine, "shutdown")),
    }


def _definition(tree: ast.AST, name: str) -> ast.AST:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next(node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name)


def _fields(definition: ast.ClassDef) -> dict[str, bool]:
    """Field of a dataclass to whether it has a default."""
    return {node.target.id: node.value is not None for node in definition.body if isinstance(node, ast.AnnAssign)}


def _routes(vllm: Path) -> set[str]:
    routers = [path for path in (vllm / "entrypoints").rglob("api_router.py") if "@router" in path.read_text()]
    return {
        f"{decorator.func.attr.upper()} {decorator.args[0].value}"
        for path in routers
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("router.get", "router.post")
    }
