"""A recorded step of a small model, and what its ranks do, without separate processes."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from megatron_rl.attribution.scoring import ScoringJob, ScoringOutcome
from megatron_rl.batching import Spool
from megatron_rl.config import Config, RunFolder
from megatron_rl.engine import build_engine
from megatron_rl.engine.groups import parallel_layout
from megatron_rl.metrics import Row
from megatron_rl.metrics.rows import JsonLines
from megatron_rl.preflight.faults import injected_fault
from megatron_rl.preflight.oracle import Oracle
from megatron_rl.preflight.sequences import sample_sequences, write_plan
from megatron_rl.preflight.shrink import SAMPLING
from megatron_rl.preflight.weights import write_random_weights


def record_steps(folder: RunFolder, config: Config) -> None:
    """Steps 0 and 1 of the same rollouts, which version 0 sampled, experts forced; in step 1 some are recorded as version 1."""
    folder.create(config)
    write_random_weights(folder.model, config.model.architecture, seed=3)
    scored = sample_sequences(Oracle(folder.model), SAMPLING, seed=5, forced_experts=True)
    rollouts = [s.rollout for s in scored]
    write_plan(folder.path, 0, rollouts)
    newer = [replace(r, policy_versions=np.full_like(r.policy_versions, number % 2)) for number, r in enumerate(rollouts)]
    write_plan(folder.path, 1, newer)
    rows = JsonLines(folder.metrics_file)
    for step in range(2):
        rows.write(Row(step, {"abs_dlogp_mean": 0.125}))
    rows.close()


def moved(held: object, tensor: Tensor) -> Tensor:
    """Weights as if after one more step."""
    return tensor * 1.05


def score(rank: int, folder: Path, config: Config, job: ScoringJob) -> tuple[dict[str, np.ndarray], ScoringOutcome]:
    """As `attribution.ranks.attribute`, but that version 1 is made up."""
    from megatron_rl.attribution.ranks import StepScorer, score_all
    from megatron_rl.engine.diagnostics import altered_weights
    from megatron_rl.trainer.model_folder import assembly_options, open_model

    run = RunFolder(folder)
    with injected_fault(job.fault), parallel_layout(config.parallel_layout) as groups:
        model = open_model(run.model)
        engine = build_engine(config, groups, model.config, model)
        with closing(engine):
            versions = {0: engine.parameters.snapshot(), 1: altered_weights(engine, moved)}
            spool, options = Spool(folder), assembly_options(config, engine)
            member = SimpleNamespace(engine=engine, groups=groups, spool=spool, options=options, folder=run, config=config)
            scorer = StepScorer(member, spool.read_plan(Spool.plan_name(job.step)), {v: versions[v] for v in job.versions})
            scores = score_all(scorer, job)
            return scores, ScoringOutcome(0, (), *(scorer.unequal_gradients() if job.compare_gradients else ((), 0)))
