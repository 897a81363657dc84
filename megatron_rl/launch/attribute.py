"""`megatron-rl attribute`: a recorded step's mismatch, factor by factor, and the fault behind it."""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.attribution.factors import Factor, as_trained, factors, hypotheses, residual
from megatron_rl.attribution.record import StepRecord, read_record
from megatron_rl.attribution.scoring import Job, Outcome
from megatron_rl.attribution.shares import AS_TRAINED, LEFT, METRICS, Attribution, attribution
from megatron_rl.attribution.table import print_attribution
from megatron_rl.batching import Spool
from megatron_rl.config import Config, ConfigError, RunFolder, load_config, to_toml
from megatron_rl.conversion.model_files import read_config
from megatron_rl.launch.local import checked_model
from megatron_rl.launch.replay import beginnings, recorded_steps
from megatron_rl.metrics import read_rows, wide_console
from megatron_rl.orchestrator.commands import rank_processes
from megatron_rl.preflight.faults import FAULTS, NEED_EXPERTS
from megatron_rl.processes import Child, ProcessError, stop_all
from megatron_rl.records import read_scores
from megatron_rl.report.rollouts import open_tokenizer, text_of
from megatron_rl.weight_mapping import ParameterTable
from megatron_rl.wire.control import decode, encode

GRACE_S = 5.0
ROUNDING = {"float32": 1e-4, "bfloat16": 0.02}
"""Mean |log p_trainer - log p_rollout| that arithmetic alone makes, of two programs that agree."""


@dataclass(frozen=True)
class Question:
    """The step, what is recorded of it, and from where its weights are reached."""

    run: RunFolder
    config: Config
    hf_config: Mapping[str, Any]
    record: StepRecord
    start: int
    plant: str | None

    @property
    def step(self) -> int:
        return self.record.plan.step

    @property
    def versions(self) -> frozenset[int]:
        """Of the tokens, those whose weights the ranks come by; and the step's own."""
        return frozenset({self.step, *(version for version in self.record.version.tolist() if version >= self.start)})

    @property
    def rounding(self) -> float:
        return ROUNDING[self.config.model.dtype]


def attribute_and_print(
    run: RunFolder, overrides: Sequence[str], step: int, *, retrain: int, plant: str | None, json_file: Path | None
) -> bool:
    """Whether nothing but rounding is left and no fault was found. The run's folder gets a new folder under attributions/, and is
    otherwise only read. ConfigError where the step cannot be scored, with those that can; ProcessError when a rank fails.
    """
    console = wide_console()
    asked = question(run, overrides, step, retrain, plant)
    if overrides:
        checked_model(asked.config)  # a layout that does not fit is refused here, in plain words
    with console.status("starting") as status:
        found = answer(asked, status.update)
    print_attribution(found, console)
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_json(), indent=2) + "\n")
    left = found.left.mismatch
    return not found.faults and left is not None and left.abs_mean <= found.rounding


def question(run: RunFolder, overrides: Sequence[str], step: int, retrain: int, plant: str | None) -> Question:
    """Everything that can be refused is refused here."""
    config = load_config(run.config_file, ["--run.fingerprints", "false", *overrides])
    recorded = recorded_steps(run)
    starts = beginnings(run, recorded)
    if step not in recorded:
        raise ConfigError(_not_recorded(run, step, reachable(starts, recorded, retrain)))
    plan = Spool(run.path).recorded(step)
    if plan is None:
        raise ConfigError(f"--step {step}: its plan or payloads went while they were being read")
    record = read_record(Spool(run.path), plan)
    if not record.num_tokens:
        raise ConfigError(f"--step {step}: none of its rollouts has a token that carries a loss")
    hf_config = read_config(run.model)
    _check_plant(plant, config, hf_config)
    oldest = int(record.version.min())
    return Question(run, config, hf_config, record, start_of(run, step, oldest, starts, recorded, retrain), plant)


def reachable(starts: Sequence[int], recorded: Sequence[int], retrain: int) -> list[int]:
    """Recorded steps whose weights are those of a beginning, or at most `retrain` recorded steps behind one."""
    return [step for step in recorded if any(step - start <= retrain for start in _leading_to(step, starts, recorded))]


def start_of(run: RunFolder, step: int, oldest: int, starts: Sequence[int], recorded: Sequence[int], retrain: int) -> int:
    """The beginning from which the weights of `step`, and if possible those of the oldest version among its tokens, are reached."""
    near = [start for start in _leading_to(step, starts, recorded) if step - start <= retrain]
    if not near:
        possible = reachable(starts, recorded, retrain)
        raise ConfigError(
            f"--step {step}: {run.path} has weights of steps {_listed(starts) or 'none'} (the start, and the kept checkpoints: "
            f"checkpoint.every, checkpoint.keep), and with --retrain {retrain} these steps are reached from there: {_listed(possible) or 'none'}"
        )
    return max((start for start in near if start <= oldest), default=max(near))


def answer(asked: Question, announce: Any) -> Attribution:
    """Runs the ranks, first under the run's configuration, then one by one under those of factors that change it."""
    asked.run.attributions.mkdir(exist_ok=True, mode=0o700)
    folder = Path(tempfile.mkdtemp(prefix=f"step_{asked.step:06d}.", dir=asked.run.attributions))
    own = factors(asked.config, asked.hf_config, asked.record, asked.versions)
    model = ParameterTable(asked.hf_config).architecture
    left = residual(asked.config, model, knows_versions=bool(set(asked.record.version) & asked.versions))
    faults = hypotheses(asked.config, model, asked.record, left)
    job = _own_job(asked, folder, own, faults, {AS_TRAINED: as_trained(asked.config), LEFT: left})
    announce(f"scoring under the run's configuration, {asked.step - asked.start} steps are trained again first; {folder}")
    scores, outcome = _run_ranks(asked, asked.config, folder / "own", job)
    for number, factor in enumerate(own):
        if factor.config is not None:
            announce(f"scoring: {factor.name}")
            own[number] = _score_elsewhere(asked, factor, folder, scores)
    texts = _texts(asked)
    rows = {row.step: row.values for row in read_rows(asked.run.metrics_file)}
    measured = {name: rows[asked.step][name] for name in METRICS if name in rows[asked.step]}
    notes = [*_notes(asked, outcome, job), f"scores and logs: {folder}"]
    return attribution(asked.record, scores, own, faults, outcome, texts, rounding=asked.rounding, recorded=measured, notes=notes)


def _own_job(asked: Question, folder: Path, own: Sequence[Factor], faults: Sequence[Factor], fixed: Mapping[str, Any]) -> Job:
    walks, layout = asked.start < asked.step, asked.config.parallel_layout
    return Job(
        step=asked.step, start=asked.start, checkpoint=str(asked.run.checkpoint(asked.start)) if asked.start else None,
        versions=tuple(sorted(asked.versions)), scorings={**fixed, **{f.name: f.scoring for f in own if f.scoring}},
        hypotheses={f.name: f.scoring for f in faults if f.scoring}, residual=LEFT, rounding=asked.rounding, plant=asked.plant,
        compare_gradients=layout.dp * layout.cp > 1, save_to=str(folder / "weights") if walks and any(f.config for f in own) else None,
    )  # fmt: skip


def _score_elsewhere(asked: Question, factor: Factor, folder: Path, scores: dict[str, np.ndarray]) -> Factor:
    """Adds the factor's scores; a configuration whose ranks fail costs this factor alone, which then says so."""
    assert factor.config is not None
    walked = asked.start < asked.step
    checkpoint = folder / "weights" if walked else asked.run.checkpoint(asked.step)
    job = Job(
        step=asked.step, start=asked.step, checkpoint=str(checkpoint) if asked.step else None, versions=(asked.step,),
        scorings={factor.name: as_trained(factor.config)}, plant=asked.plant,
    )  # fmt: skip
    place = folder / factor.name.replace(" ", "-").replace(":", "")
    try:
        found, _ = _run_ranks(asked, factor.config, place, job)
    except ProcessError as error:
        return replace(factor, config=None, reason=f"its ranks failed: {error}")
    scores |= found
    return factor


def _run_ranks(asked: Question, config: Config, folder: Path, job: Job) -> tuple[dict[str, np.ndarray], Outcome]:
    """Scores by name and the outcome. However this ends, no rank is left."""
    scratch = RunFolder(folder)
    folder.mkdir(mode=0o700)
    scratch.config_file.write_text(to_toml(config))
    (folder / "job.json").write_bytes(encode(job))
    argv = [sys.executable, "-m", "megatron_rl.attribution.ranks", str(asked.run.path), str(folder)]
    children: list[Child] = []
    try:
        for command in rank_processes("attribution", argv, config, scratch.logs, {"HF_HUB_OFFLINE": "1"}):
            children.append(Child(command))
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            time.sleep(0.1)
        if failed := [child for child in children if child.poll()]:
            raise ProcessError(failed[0].failure())
    finally:
        stop_all(children, GRACE_S)
    return read_scores(folder / "scores.safetensors"), decode((folder / "outcome.json").read_bytes(), Outcome)


def _texts(asked: Question) -> list[str]:
    """Of each loss token; empty where the model brings no tokenizer."""
    tokenizer = open_tokenizer(asked.run)
    return [text_of(tokenizer, [token]) if tokenizer else "" for token in asked.record.token.tolist()]


def _notes(asked: Question, outcome: Outcome, job: Job) -> list[str]:
    notes = [f"planted: {asked.plant}"] if asked.plant else []
    start = f"checkpoint {asked.start}" if asked.start else "the run's start"
    if outcome.retrained:
        wrong = outcome.differing_metrics
        said = (
            f"; NOT as recorded: {', '.join(wrong)}, so that the weights are not quite the run's"
            if wrong
            else ", with the recorded metrics"
        )
        notes.append(f"weights: from {start}, {outcome.retrained} steps trained again{said}")
    else:
        notes.append(f"weights: from {start}")
    if job.compare_gradients:
        notes.append(
            f"gradients: {len(outcome.unequal_gradients)} of {outcome.num_gradients} that lie on several ranks differ between these"
        )
    else:
        notes.append("gradients: not compared, since at this layout no two ranks train the same parameters on different tokens")
    if asked.config.trainer.updates_per_step > 1:
        notes.append("the run's own numbers are of several updates; here all is scored by the weights before the first")
    return notes


def _check_plant(plant: str | None, config: Config, hf_config: Mapping[str, Any]) -> None:
    if plant is None:
        return
    if plant not in FAULTS:
        raise ConfigError(f"--plant {plant}: no such fault; known are {', '.join(FAULTS)}")
    if plant in NEED_EXPERTS and ParameterTable(hf_config).architecture.moe is None:
        raise ConfigError(f"--plant {plant}: the model has no experts")
    if plant == "unreduced-expert-grad" and config.parallel_layout.edp == 1:
        raise ConfigError(
            f"--plant {plant}: at this layout each expert lies on one rank, so that no gradient is summed over ranks; ask for another, "
            "for example with --layout.world_size 2 --layout.expert 1"
        )


def _not_recorded(run: RunFolder, step: int, possible: Sequence[int]) -> str:
    trained = {row.step for row in read_rows(run.metrics_file)} if run.metrics_file.exists() else set()
    spool = Spool(run.path)
    if step in trained:
        why = f"the step was trained, but its plan or payloads are no longer whole in {spool.root}"
    elif spool.path(spool.plan_name(step)).exists():
        why = "the step has been planned and is not done; wait for it"
    else:
        why = f"{run.path} has no such step" + (
            f", it has done {min(trained)} to {max(trained)}" if trained else ": none is done yet"
        )
    return f"--step {step}: {why}; possible are: {_listed(possible) or 'none'}"


def _leading_to(step: int, starts: Sequence[int], recorded: Sequence[int]) -> list[int]:
    """Beginnings from which recorded steps lead to `step` without a gap."""
    there = set(recorded)
    return [start for start in starts if start <= step and all(n in there for n in range(start, step))]


def _listed(steps: Sequence[int]) -> str:
    """Rising numbers with runs drawn together: 0..3, 7."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][-1] == step - 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{p[0]}..{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
