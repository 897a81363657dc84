"""Each factor, and each injected fault found and named, on a recorded step whose right log-probs transformers' model gave in
float64.

Two ranks that hold the same experts and train different tokens. Not proved here: processes, checkpoints
(tests/e2e/test_attribute.py).
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.attribution import request
from megatron_rl.attribution import run as attribution_run
from megatron_rl.attribution.effects import Attribution
from megatron_rl.attribution.request import make_request
from megatron_rl.attribution.run import run_attribution
from megatron_rl.config import RunFolder, load_config
from megatron_rl.conversion.model_files import hf_config_of
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.preflight.shrink import CHECK_SIZES, shrunk_config
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping.shrink import shrink_model
from tests.distributed.attribution import cases

CONFIG = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"
Attributed = Callable[[int, str | None], Attribution]
ROUNDING = 1e-5
"""Of log-probs of logits of size 10 in fp32, after four layers, about 1e-6."""


@pytest.fixture(scope="module")
def attributed(tmp_path_factory, one: RankPool, two: RankPool):
    """(step, fault) -> its attribution. All share the record and the processes."""
    config = load_config(CONFIG)
    config = shrunk_config(config, shrink_model(hf_config_of(config), CHECK_SIZES), Layout(2))
    run = RunFolder(tmp_path_factory.mktemp("attribution") / "run")
    cases.record_steps(run, config)
    with pytest.MonkeyPatch.context() as patch:

        def run_ranks(asked, config, folder, job):
            return {1: one, 2: two}[config.layout.world_size].run(cases.score, asked.run.path, config, job)[0]

        patch.setattr(attribution_run, "_run_ranks", run_ranks)
        patch.setattr(request, "starting_steps", lambda run, recorded: [0, 1])
        yield lambda step, fault: run_attribution(make_request(run, [], step, 20, fault), lambda line: None)


def test_in_a_healthy_step_every_replay_counts_and_rounding_is_left(attributed: Attributed) -> None:
    found = attributed(0, None)
    assert found.faults == () and found.hypotheses == ()
    assert found.left.mismatch.abs_mean < ROUNDING and found.as_trained.mismatch.abs_max < 10 * ROUNDING
    assert found.recorded == {"abs_dlogp_mean": 0.125}
    rows = {row.name: row for row in found.rows}
    for name in ("routing replay off", "keep-set replay off", "temperature 1", "dropout 0.1"):
        assert rows[name].accounts_for < -1e-2, name
    assert rows["keep-set replay off"].mismatch.ratio_mean < 0.97  # the mass that top-p cut off is missing
    assert rows["another layout: one rank"].mismatch.abs_mean < ROUNDING
    assert "all tokens were sampled by" in rows["staleness 0"].reason and "neither" in rows["quantisation off"].reason
    assert {t.explained_by for t in found.worst} == {"rounding"} and len(found.worst) == 10


def test_staleness_is_undone_by_the_weights_that_sampled_each_token(attributed: Attributed) -> None:
    """Half of the rollouts are recorded as of the step's own version, which did not sample them: their mismatch stays."""
    found = attributed(1, None)
    stale = next(row for row in found.rows if row.name == "staleness 0")
    assert stale.accounts_for > 0.1 * found.as_trained.mismatch.abs_mean
    worst = {token.staleness: token for token in found.worst}
    assert worst[1].explained_by == "staleness 0" and worst[1].with_change["staleness 0"] < 10 * ROUNDING
    assert worst[0].explained_by == "no single change"
    assert found.faults == () and found.hypotheses  # too much is left, and no known fault causes it


@pytest.mark.parametrize(
    ("injected", "fault"),
    [
        ("shifted-routes", "routes are shifted: tokens go to the experts of the token before them"),
        ("one-sided-temperature", "temperature is applied on one side: sampled at 0.7, and the trainer does not score at it"),
        ("swapped-gate-up", "gate and up are swapped"),
        ("unreduced-expert-grad", "experts' gradients are not summed over the ranks that hold the same parameters"),
    ],
)
def test_an_injected_fault_is_named_and_no_other(attributed: Attributed, injected: str, fault: str) -> None:
    found = attributed(0, injected)
    assert len(found.faults) == 1 and found.faults[0].startswith(fault), found.faults
    if injected != "unreduced-expert-grad":
        assert found.left.mismatch.abs_mean > 1e-2
        assert sum(token.explained_by == found.faults[0] for token in found.worst) >= 8
