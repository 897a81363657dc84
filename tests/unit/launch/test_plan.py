"""`megatron-rl plan`: what it prints, what it writes, and what it refuses, each with the remedy."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.config import load_config
from megatron_rl.launch.cli import app
from megatron_rl.planner import workload_of

ROOT = Path(__file__).parents[3]
PUBLISHED = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run of Qwen3-30B-A3B; of its model's folder there is config.json alone."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"]["config"]))
    text = (ROOT / "model_configs" / "qwen3-30b-a3b.toml").read_text()
    run = tmp_path / "run.toml"
    run.write_text(text.replace('"models/Qwen3-30B-A3B"', f'"{model}"'))
    return run


def invoke(file: Path, *words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", str(file), *words])
    assert result.exit_code == status, result.output
    return result.output


def test_plans_are_printed_with_their_assumptions(file: Path) -> None:
    output = invoke(file, "--gpus", "16", "--top", "2")
    for word in (
        "gradients",
        "optimizer state",
        "bubble",
        "servers",
        "room",
        "assumed",
        "--mean-response",
        "NVIDIA H200 data sheet",
    ):
        assert word in output


def test_a_plan_is_written_and_drawn(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    invoke(file, "--gpus", "16", "--context", "32768", "--write", "--picture", str(picture))
    config = load_config(file)
    assert config.layout.world_size + config.servers.count * config.servers.tensor <= 16
    assert config.model.max_sequence_length == 32768
    assert "# Qwen3-30B-A3B: 48 layers" in file.read_text()
    assert "<svg" in picture.read_text()
    assert not list(tmp_path.glob(".run*"))


@pytest.mark.parametrize(("context", "longest_response"), [(14336, 12288), (20480, 16384)])
def test_what_is_written_is_what_was_planned(file: Path, context: int, longest_response: int) -> None:
    """A shorter sequence takes from the prompt, a longer one gives to the response; a link stays a link."""
    link = file.with_name("link.toml")
    link.symlink_to(file.name)
    work = workload_of(load_config(file), context=context)
    invoke(link, "--gpus", "16", "--context", str(context), "--write")
    written = load_config(file)
    assert link.is_symlink() and load_config(link) == written
    assert (written.model.max_sequence_length, written.rollouts.max_new_tokens) == (context, longest_response)
    assert work.mean_response == written.rollouts.max_new_tokens / 2 == workload_of(written).mean_response


def test_a_named_layout_that_fits_and_one_that_does_not(file: Path) -> None:
    assert "the planner's own choice" in invoke(file, "--gpus", "32", "--explain", "TP=2,EP=8,GPUS=16,RECOMPUTE=full")
    assert "does not fit" in invoke(file, "--gpus", "16", "--explain", "TP=1,GPUS=1", status=1)
    invoke(file, "--gpus", "64", "--explain", "config")


def test_layers_that_are_not_counted_are_printed(file: Path, tmp_path: Path) -> None:
    """Of GLM-4.5-Air: one, as large as its last decoder layer and what joins it to the model."""

    def printed(*words: str) -> str:
        return CliRunner().invoke(app, ["plan", str(file), "--gpus", "64", "--explain", "TP=1,GPUS=32,EP=8", *words]).output

    assert "not counted" not in printed("--model.mtp", "trained")  # this model has none
    (tmp_path / "model" / "config.json").write_text(json.dumps(PUBLISHED["GLM-4.5-Air"]["config"]))
    assert "not counted" not in printed()
    hidden, expert = 4096, 3 * 4096 * 1408
    layer = 129 * expert + (2 * 96 + 2 * 8) * 128 * hidden + 128 * hidden
    found = re.search(r"not counted.* ([0-9.]+) billion", printed("--model.mtp", "trained"))
    assert float(found[1]) == pytest.approx((layer + 2 * hidden**2) / 1e9, rel=4e-3)  # printed with three digits


def test_an_infeasible_request_names_what_is_missing_and_what_would_do(file: Path) -> None:
    output = invoke(file, "--gpus", "2", status=1)
    assert "no layout fits" in output and "lacks" in output and "the nearest that fits" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus 0: 1 or more"),
        ([], "--gpus is missing"),
        (["--gpus", "1"], "an accelerator each"),
        (["--gpus", "12"], "--nodes-of 8"),
        (["--gpus", "16", "--trainer-gpus", "16"], "fewer than --gpus"),
        (["--gpus", "16", "--gpu-type", "h300"], "h100, h200"),
        (["--gpus", "16", "--optimizer", "sgd"], "adamw, muon"),
        (["--gpus", "16", "--imbalance", "0.5"], "at least the mean"),
        (["--gpus", "16", "--imbalance", "nan"], "at least the mean"),
        (["--gpus", "16", "--mean-response", "nan"], "1 or more"),
        (["--gpus", "16", "--mean-response", "99999"], "longer than the longest"),
        (["--gpus", "16", "--picture", "a.pdf"], ".svg or .png"),
        (["--gpus", "16", "--explain", "TP=3"], "not a multiple"),
        (["--gpus", "16", "--model.path", "nowhere", "--model.published_config", "none"], "config.json"),
        (["--gpus", "16", "--context", "0"], "--context 0"),
        (
            ["--gpus", "16", "--context", "4096", "--rollouts.max_new_tokens", "4096"],
            "--context 4096: a prompt and a response of rollouts.max_new_tokens = 4096 do not fit into it; raise it above 4096",
        ),
        (["--gpus", "16", "--explain", "config", "--write"], "--explain makes none"),
        (["--gpus", "16", "--explain", " "], "names no layout"),
        (["--gpus", "16", "--explain", "TP"], "TP has no value"),
        (["--gpus", "16", "--explain", "TP=2,tp=4"], "TP is given twice"),
        (["--gpus", "16", "--explain", "TP=2,GPUS=32"], "32 ranks are more than --gpus 16"),
        (["--gpus", "16", "--picture", "nowhere/a.svg"], "--picture nowhere/a.svg: no file can be written there"),
    ],
)
def test_bad_requests(file: Path, words: list[str], message: str) -> None:
    assert message in invoke(file, *words, status=2)


@pytest.mark.parametrize(("context", "response"), [(None, 1024), (2048, 1024), (1025, 1024), (5120, 2048)])
def test_a_shorter_context_shortens_prompts_and_a_longer_one_lengthens_responses(context: int | None, response: int) -> None:
    config = load_config(
        ROOT / "model_configs" / "qwen3-30b-a3b.toml",
        ["--model.max_sequence_length", "4096", "--rollouts.max_new_tokens", "1024"],
    )
    work = workload_of(config, context=context)
    assert work.mean_response == response / 2 and work.mean_prompt >= 1
    assert work.longest_sequence == (context or 4096) and work.mean_tokens <= work.longest_sequence
