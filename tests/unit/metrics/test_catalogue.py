"""The catalogue names whatever a run writes, and whatever is shown of a run is in the catalogue."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.batching import Spool, microbatches_for, summarise
from megatron_rl.config.sections import Objective
from megatron_rl.metrics import merge, to_floats
from megatron_rl.metrics.arms import _ALL_STEPS, _BOTH_ENDS, _LARGEST
from megatron_rl.metrics.catalogue import CATALOGUE, PANELS, SOURCES, curves_of, documented, unknown_names
from megatron_rl.objective import Denominators, PolicyLoss, SupervisedLoss, mismatch_metrics, token_batch
from megatron_rl.objective.ratio_quantiles import QUANTILES as RATIO_QUANTILES
from megatron_rl.orchestrator.ledger import Ledger
from megatron_rl.rollouts.group import summary_of
from megatron_rl.topology import Layout
from megatron_rl.trainer.set_sizes import QUANTILES as SIZE_QUANTILES
from tests.unit.batching.test_assemble import OPTIONS, random_step
from tests.unit.batching.test_step import GROUPS
from tests.unit.objective.reference import random_microbatch, random_policies
from tests.unit.records.random_rollouts import CONTRACT

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "metric_names.json").read_text())
"""By phase, the names in metrics.jsonl of a run of the demo with staleness, probes and a supervised start."""


def spec_of(name):
    (spec,) = [spec for spec in CATALOGUE if spec.covers(name)]
    return spec


@pytest.mark.parametrize("phase", ["supervised", "train"])
def test_a_runs_names_are_in_the_catalogue_once(phase):
    names = RECORDED[phase].split()
    assert len(names) > 10 and unknown_names(names) == []
    for name in names:
        spec_of(name)


def test_a_name_that_nobody_declared_is_found():
    assert unknown_names(["reward_mean", "reward_meen", "abs_dlogp_max/singleton", "mtp_loss_", "ratio_mean/staleness_x"]) == [
        "reward_meen", "abs_dlogp_max/singleton", "mtp_loss_", "ratio_mean/staleness_x",
    ]  # fmt: skip


def test_what_the_parts_of_a_run_measure_is_in_the_catalogue():
    """Also what the recorded run did not switch on: a reference policy, the Muon clip, layers for multi-token prediction."""
    ledger = {f"ledger/{name}" for name in Ledger(max_attempts=1).summary()}
    rare = {"max_attention_logit", "mtp_loss_1", "keep_set_size_max", "trainer_waits_s"}
    assert unknown_names([*summarise(6, GROUPS), *RATIO_QUANTILES, *SIZE_QUANTILES, *ledger, *rare]) == []


def test_the_objectives_metrics_are_reduced_as_the_catalogue_says():
    rng = np.random.default_rng(0)
    m = random_microbatch(rng, [5, 9, 4])
    policies = {name: values.float() for name, values in random_policies(rng, m).items()}
    old, reference = policies["old"], policies["reference"]
    batch = token_batch(m, Denominators(18, 3), old_logprobs=old, reference_logprobs=reference, entropy=old)
    losses = (PolicyLoss(Objective(kl_coefficient=0.1)), SupervisedLoss())
    measured = [loss(policies["logp"], batch)[1].metrics() for loss in losses]
    measured.append({f"probe/{name}": metric for name, metric in mismatch_metrics(policies["logp"], batch).metrics().items()})
    for metrics in measured:
        assert len(metrics) > 1 and {name: spec_of(name).reduction for name in metrics} == {
            name: metric.reduction for name, metric in metrics.items()
        }


def test_the_batchs_names_and_the_trainers_are_distinct_and_both_count_the_same_singletons(tmp_path):
    """The share that the loss measures is that of the rollouts, to the bit, however they are packed; each has a name of its
    own."""
    spool = Spool(tmp_path)
    spool.create()
    rollouts, plan = random_step(spool)
    for layout in (Layout(), Layout(world_size=3, ep=3)):
        measured = []
        for rank in range(layout.world_size):
            for m in microbatches_for(plan, spool, layout, layout.coords_of(rank), OPTIONS):
                batch = token_batch(m, Denominators.of(plan))
                measured.append(PolicyLoss(Objective())(torch.zeros(m.num_positions), batch)[1].metrics())
        values = to_floats(merge(measured))
        summaries = [summary_of(r, "", 0, CONTRACT) for r in rollouts]
        counted = sum(s.num_singletons for s in summaries)
        assert counted > 0 and values["singleton_share"] == counted / sum(s.num_loss_tokens for s in summaries)
        assert not values.keys() & summarise(6, GROUPS).keys()


def test_what_is_shown_is_in_the_catalogue():
    shown = [*_BOTH_ENDS.values(), *_LARGEST.values(), *_ALL_STEPS.values()]
    shown += [spec.summary.weight for spec in CATALOGUE if spec.summary and spec.summary.weight]
    assert unknown_names(shown) == []
    panels = [panel.title for panel in PANELS]
    assert len(set(panels)) == len(panels) and all(curves_of(panel) for panel in PANELS)
    assert {spec.report.panel for spec in CATALOGUE if spec.report} == set(panels)
    keys = [spec.summary.key for spec in CATALOGUE if spec.summary]
    assert len(set(keys)) == len(keys)


def test_every_entry_is_documented_once():
    tables = documented()
    assert list(tables) == list(SOURCES.values()) and all(tables.values())
    names = [row[0] for rows in tables.values() for row in rows]
    assert sorted(names) == sorted(spec.name for spec in CATALOGUE) and len(set(names)) == len(names)
    assert all(meaning and reduction for rows in tables.values() for _, _, meaning, reduction, _ in rows)
    (reward,) = [row for row in tables[SOURCES["rollouts"]] if row[0] == "reward_mean"]
    assert reward[3:] == ("mean", "console, summary, report")
