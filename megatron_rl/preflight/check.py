"""`megatron-rl check`: all stages on a small copy of the user's run.

The next stages run even if one fails.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.conversion.model_files import hf_config_of
from megatron_rl.engine.rank_pool import CaseFailedError, RankPool
from megatron_rl.errors import RunError, UserError
from megatron_rl.inference.errors import ServerError
from megatron_rl.preflight import server, stages
from megatron_rl.preflight.faults import check_fault_applies
from megatron_rl.preflight.preparation import make_subject, small_run
from megatron_rl.preflight.results import CheckReport, Measurement, StageResult
from megatron_rl.preflight.subject import Subject
from megatron_rl.processes import ProcessError
from megatron_rl.records import ContractError

STAGES = {
    "conversion": "Hugging Face -> Megatron -> Hugging Face, to the last bit",
    "forward": "one rank against transformers in float64",
    "layout": "the layout against one rank",
    "replay": "experts, keep-sets and temperature replayed",
    "sync": "one update of a real vLLM server",
}
"""Titles by stage name; a failure is reported under the name."""

Announce = Callable[[str], None]


def check(
    config: Config, *, fault: str | None = None, with_server: bool = True, announce: Announce = lambda line: None
) -> CheckReport:
    """Runs all stages in local processes on the CPU; they have exited when it returns.

    Args:
        config: The user's run; a small copy of it is checked.
        fault: One of `preflight.faults.FAULTS`, injected into every stage to see that a stage fails; None injects nothing.
        with_server: Whether to run the stage with a real vLLM server, where this machine can.
        announce: Called with one line before each stage.

    Returns:
        The measurements of all stages.

    Raises:
        ConfigError: `fault` does not exist, or the model cannot have it.
        UserError: Layout and model do not fit each other, or the model's family is not known.
    """
    small = small_run(config, hf_config_of(config), expert_replicas=fault == "unreduced-expert-grad")
    check_fault_applies(fault, small.model.architecture or {})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # everything here runs on the CPU
    with TemporaryDirectory(prefix="megatron-rl-check-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        layout_pool = stack.enter_context(RankPool(small.layout.world_size, folder / "ranks.log"))
        single_rank = stack.enter_context(RankPool(1, folder / "ranks.log"))
        for pool in (layout_pool, single_rank):
            pool.start()  # the ranks load their libraries while the oracle samples
        announce("sampling sequences from transformers' model")
        subject, gradients = make_subject(folder, small)
        reason = server.why_no_server(subject) if with_server else "--no-server"
        child = None if reason else stack.enter_context(server.running_server(subject))
        found = run_stages(subject, gradients, single_rank, layout_pool, fault, announce)
        if child is None:
            found.append(StageResult("sync", STAGES["sync"], skipped=True, note=f"not run: {reason}"))
        else:
            found.append(_run("sync", lambda: server.sync(subject, layout_pool, child, fault), announce))
        return CheckReport(subject.model, subject.config.layout.model_dump(), fault, tuple(found))


def run_stages(
    subject: Subject,
    gradients: Mapping[str, Tensor],
    single_rank: RankPool,
    layout_pool: RankPool,
    fault: str | None,
    announce: Announce = lambda line: None,
) -> list[StageResult]:
    """Runs all stages but the one that needs a server.

    Args:
        subject: The small model and its sequences.
        gradients: The oracle's gradients of the supervised loss, by checkpoint name.
        single_rank: Processes for one rank.
        layout_pool: Processes for as many ranks as the subject's layout has.
        fault: Injected into every stage; None injects nothing.
        announce: Called with one line before each stage.

    Returns:
        One result per stage, in the order of `STAGES`.
    """
    proofs: dict[str, Callable[[], Sequence[Measurement]]] = {
        "conversion": lambda: stages.conversion(subject, layout_pool, fault),
        "forward": lambda: stages.forward(subject, gradients, single_rank, fault),
        "layout": lambda: stages.layout(subject, single_rank, layout_pool, fault),
        "replay": lambda: stages.replay(subject, layout_pool, fault),
    }
    return [_run(name, proof, announce) for name, proof in proofs.items()]


def _run(name: str, proof: Callable[[], Sequence[Measurement]], announce: Announce) -> StageResult:
    announce(f"{name}: {STAGES[name]}")
    began = time.monotonic()
    measured: tuple[Measurement, ...] = ()
    note = ""
    try:
        measured = tuple(proof())
    except (CaseFailedError, ProcessError, ServerError, ContractError, UserError, RunError, ValueError) as error:
        note = str(error)
    return StageResult(name, STAGES[name], measured, aborted=bool(note), note=note, seconds=time.monotonic() - began)
