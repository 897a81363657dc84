"""Runs the ranks that score a step.

First under the run's configuration, then once for each factor that needs another configuration.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_rl.attribution.effects import AS_TRAINED, LEFT, METRICS, Attribution, attribution
from megatron_rl.attribution.factors import Factor, as_trained, factors, hypotheses, residual
from megatron_rl.attribution.request import AttributionRequest
from megatron_rl.attribution.scoring import JOB, OUTCOME, SCORES, Scoring, ScoringJob, ScoringOutcome
from megatron_rl.config import Config, RunFolder, to_toml
from megatron_rl.metrics import read_rows
from megatron_rl.orchestrator.commands import rank_processes
from megatron_rl.orchestrator.devices import devices_for, ranks_plan
from megatron_rl.processes import Child, ProcessError, stop_all
from megatron_rl.records import read_scores
from megatron_rl.report.rollouts import open_tokenizer, text_of
from megatron_rl.weight_mapping import ParameterTable
from megatron_rl.wire.control import decode, encode

GRACE_S = 5.0

Announce = Callable[[str], None]


def run_attribution(request: AttributionRequest, announce: Announce) -> Attribution:
    """Scores the step in all ways and compares them.

    The run's folder gets a new folder under attributions/ with configurations, logs and scores, and is otherwise only read.

    Args:
        request: The step.
        announce: Called with one line before each group of ranks starts.

    Raises:
        ProcessError: A rank under the run's own configuration failed.
    """
    request.run.attributions.mkdir(exist_ok=True, mode=0o700)
    folder = Path(tempfile.mkdtemp(prefix=f"step_{request.step:06d}.", dir=request.run.attributions))
    changes = factors(request.config, request.hf_config, request.record, request.versions)
    model = ParameterTable(request.hf_config).architecture
    left = residual(request.config, model, knows_versions=bool(set(request.record.version) & request.versions))
    faults = hypotheses(model, request.record, left)
    job = _own_job(request, folder, changes, faults, {AS_TRAINED: as_trained(request.config), LEFT: left})
    announce(
        f"scoring under the run's configuration, after training {request.step - request.start} steps again; scores and logs: "
        f"{folder}"
    )
    scores, outcome = _run_ranks(request, request.config, folder / "own", job)
    for number, factor in enumerate(changes):
        if factor.config is not None:
            announce(f"scoring: {factor.name}")
            changes[number] = _score_elsewhere(request, factor, folder, scores)
    rows = {row.step: row.values for row in read_rows(request.run.metrics_file)}
    measured = {name: rows[request.step][name] for name in METRICS if name in rows[request.step]}
    remarks: list[str] = []
    texts = _texts(request, remarks.append)
    return attribution(
        request.record,
        scores,
        changes,
        faults,
        outcome,
        texts,
        rounding=request.rounding,
        recorded=measured,
        notes=[*remarks, *_notes(request, outcome, job), f"scores and logs: {folder}"],
    )


def _own_job(
    request: AttributionRequest, folder: Path, changes: Sequence[Factor], faults: Sequence[Factor], fixed: Mapping[str, Scoring]
) -> ScoringJob:
    trains_again, layout = request.start < request.step, request.config.parallel_layout
    return ScoringJob(
        step=request.step,
        start=request.start,
        checkpoint=str(request.run.checkpoint(request.start)) if request.start else None,
        versions=tuple(sorted(request.versions)),
        scorings={**fixed, **{f.name: f.scoring for f in changes if f.scoring}},
        hypotheses={f.name: f.scoring for f in faults if f.scoring},
        residual=LEFT,
        rounding=request.rounding,
        fault=request.fault,
        compare_gradients=layout.dp * layout.cp > 1,
        save_to=str(folder / "weights") if trains_again and any(f.config for f in changes) else None,
    )


def _score_elsewhere(request: AttributionRequest, factor: Factor, folder: Path, scores: dict[str, np.ndarray]) -> Factor:
    """Adds the factor's scores; where the ranks of its configuration fail, only this factor is lost, and says so."""
    assert factor.config is not None
    trained_again = request.start < request.step
    checkpoint = folder / "weights" if trained_again else request.run.checkpoint(request.step)
    job = ScoringJob(
        step=request.step,
        start=request.step,
        checkpoint=str(checkpoint) if request.step else None,
        versions=(request.step,),
        scorings={factor.name: as_trained(factor.config)},
        fault=request.fault,
    )
    place = folder / factor.name.replace(" ", "-").replace(":", "")
    try:
        found, _ = _run_ranks(request, factor.config, place, job)
    except ProcessError as error:
        return replace(factor, config=None, reason=f"its ranks failed: {error}")
    scores |= found
    return factor


def _run_ranks(
    request: AttributionRequest, config: Config, folder: Path, job: ScoringJob
) -> tuple[dict[str, np.ndarray], ScoringOutcome]:
    """Scores by name and the outcome. However this ends, no rank keeps running."""
    scratch = RunFolder(folder)
    folder.mkdir(mode=0o700)
    scratch.config_file.write_text(to_toml(config))
    (folder / JOB).write_bytes(encode(job))
    argv = [sys.executable, "-m", "megatron_rl.attribution.ranks", str(request.run.path), str(folder)]
    children: list[Child] = []
    try:
        plan = ranks_plan(config, "attribution", devices_for(config))
        commands = rank_processes("attribution", argv, config, scratch.logs, plan, {"HF_HUB_OFFLINE": "1"})
        children.extend(Child(command) for command in commands)  # one by one: where one cannot start, those before it are stopped
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            time.sleep(0.1)
        if failed := [child for child in children if child.poll()]:
            raise ProcessError(failed[0].failure())
    finally:
        stop_all(children, GRACE_S)
    return read_scores(folder / SCORES), decode((folder / OUTCOME).read_bytes(), ScoringOutcome)


def _texts(request: AttributionRequest, remark: Callable[[str], None]) -> list[str]:
    """The text of each loss token; empty where the model has no tokenizer, or one that cannot be read, which is a remark."""
    tokenizer = open_tokenizer(request.run, remark)
    return [text_of(tokenizer, [token]) if tokenizer else "" for token in request.record.token.tolist()]


def _notes(request: AttributionRequest, outcome: ScoringOutcome, job: ScoringJob) -> list[str]:
    notes = [f"injected fault: {request.fault}"] if request.fault else []
    start = f"checkpoint {request.start}" if request.start else "the run's start"
    if outcome.retrained:
        wrong = outcome.differing_metrics
        compared = (
            f"; metrics that are NOT as recorded: {', '.join(wrong)}, so that the weights are not quite the run's"
            if wrong
            else ", with the recorded metrics"
        )
        notes.append(f"weights: from {start}, {outcome.retrained} steps trained again{compared}")
    else:
        notes.append(f"weights: from {start}")
    if job.compare_gradients:
        notes.append(
            f"gradients: {len(outcome.unequal_gradients)} of {outcome.num_gradients} that several ranks hold differ between "
            "these ranks"
        )
    else:
        notes.append("gradients: not compared, since at this layout no two ranks train the same parameters on different tokens")
    if request.config.trainer.updates_per_step > 1:
        notes.append(
            "the run's own metrics cover several updates of the weights; here all is scored with the weights before the first one"
        )
    return notes
