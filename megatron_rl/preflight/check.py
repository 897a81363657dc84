"""`megatron-rl check`: all stages on a small copy of the user's run. One that fails does not keep the next from running."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from megatron_rl.config import Config, ConfigError
from megatron_rl.conversion.model_files import read_config
from megatron_rl.engine.rank_pool import CaseFailed, RankPool
from megatron_rl.inference.errors import ServerError
from megatron_rl.preflight import server, stages
from megatron_rl.preflight.faults import FAULTS, NEED_EXPERTS
from megatron_rl.preflight.making import make_subject, small_run
from megatron_rl.preflight.results import CheckReport, Measurement, StageResult
from megatron_rl.preflight.subject import Subject
from megatron_rl.processes import ProcessError
from megatron_rl.records import ContractError
from megatron_rl.weight_mapping import ParameterTable

STAGES = {
    "conversion": "Hugging Face -> Megatron -> Hugging Face, to the last bit",
    "forward": "one rank against transformers in float64",
    "layout": "the layout against one rank",
    "replay": "experts, keep-sets and temperature replayed",
    "sync": "one update of a real vLLM server",
}
"""Names, by which a failure is called, and titles."""

Announce = Callable[[str], None]


def check(
    config: Config, *, plant: str | None = None, with_server: bool = True, announce: Announce = lambda line: None
) -> CheckReport:
    """Run all stages. ValueError where the run itself cannot be: layout and model do not fit, or nobody knows the model.

    plant: a fault to plant, of FAULTS. announce: called with a line before each stage.
    """
    small = small_run(config, hf_config_of(config), expert_replicas=plant == "unreduced-expert-grad")
    _check_plant(plant, small)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # everything here runs on the CPU
    with TemporaryDirectory(prefix="megatron-rl-check-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        many = stack.enter_context(RankPool(small.layout.world_size, folder / "ranks.log"))
        one = stack.enter_context(RankPool(1, folder / "ranks.log"))
        for world in (many, one):
            world.start()  # loads its libraries while the oracle samples
        announce("sampling sequences from transformers' model")
        subject, gradients = make_subject(folder, small)
        reason = server.why_not(subject) if with_server else "--no-server"
        child = None if reason else stack.enter_context(server.running_server(subject))
        found = run_stages(subject, gradients, one, many, plant, announce)
        if child is None:
            found.append(StageResult("sync", STAGES["sync"], skipped=True, note=f"not run: {reason}"))
        else:
            found.append(_run("sync", lambda: server.sync(subject, many, child, plant), announce))
        return CheckReport(subject.model, subject.config.layout.model_dump(), plant, tuple(found))


def run_stages(
    subject: Subject,
    gradients: Mapping[str, Tensor],
    one: RankPool,
    many: RankPool,
    plant: str | None,
    announce: Announce = lambda line: None,
) -> list[StageResult]:
    """All stages but the server's; one, many: worlds of one rank and of as many as the subject's layout has."""
    proofs: dict[str, Callable[[], Sequence[Measurement]]] = {
        "conversion": lambda: stages.conversion(subject, many, plant),
        "forward": lambda: stages.forward(subject, gradients, one, plant),
        "layout": lambda: stages.layout(subject, one, many, plant),
        "replay": lambda: stages.replay(subject, many, plant),
    }
    return [_run(name, proof, announce) for name, proof in proofs.items()]


def hf_config_of(config: Config) -> dict[str, Any]:
    """config.json of the user's model; its weights are not looked at."""
    return (
        dict(config.model.architecture) if config.model.architecture is not None else read_config(Path(config.model.path or "."))
    )


def _check_plant(plant: str | None, small: Config) -> None:
    if plant is None:
        return
    if plant not in FAULTS:
        raise ConfigError(f"--plant {plant}: no such fault; known are {', '.join(FAULTS)}")
    if plant in NEED_EXPERTS and ParameterTable(small.model.architecture or {}).architecture.moe is None:
        raise ConfigError(
            f"--plant {plant}: the model has no experts; plant one of {', '.join(p for p in FAULTS if p not in NEED_EXPERTS)}"
        )


def _run(name: str, proof: Callable[[], Sequence[Measurement]], announce: Announce) -> StageResult:
    announce(f"{name}: {STAGES[name]}")
    began = time.monotonic()
    try:
        measured, note = tuple(proof()), ""
    except (CaseFailed, ProcessError, ServerError, ContractError, ValueError) as error:
        measured, note = (), str(error)
    return StageResult(name, STAGES[name], measured, broke_off=bool(note), note=note, seconds=time.monotonic() - began)
