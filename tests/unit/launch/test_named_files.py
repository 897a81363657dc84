"""A file or folder that the command line names, and that cannot be read or written: status 2, and a message that names it."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.conversion import make_random_model
from megatron_rl.launch.cli import app
from tests.unit.launch.test_prepare import MODEL

CONFIG = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder: with a configuration, a file, a folder and a model."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(CONFIG, "run.toml")
    Path("file").touch()
    Path("folder.svg").mkdir()
    make_random_model(tmp_path / "model", MODEL, seed=0)
    return tmp_path


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize("name", ["none/a.svg", "folder.svg", "file/a.svg"])
@pytest.mark.parametrize(
    "words",
    [
        ["check", "run.toml", "--json"],
        ["attribute", "run", "--step", "0", "--json"],
        ["plan", "run.toml", "--measure", "--machines"],
        ["plan", "run.toml", "--gpus", "8", "--picture"],
    ],
    ids=lambda words: words[0] + words[-1],
)
def test_an_output_file_is_refused_before_the_work(folder, words, name):
    assert f"{words[-1]} {name}" in refusal(*words, name)


def test_a_configuration_that_cannot_be_rewritten(folder):
    before = Path("run.toml").read_text()
    Path(".run.toml.plan").mkdir()
    assert ".run.toml.plan: Is a directory; --write" in refusal("plan", "run.toml", "--gpus", "8", "--write")
    assert Path("run.toml").read_text() == before


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
@pytest.mark.parametrize("source", ["none", "file", "file/model", "folder.svg"])
def test_a_source_without_a_model(folder, direction, source):
    assert source in refusal("convert", direction, source, "out")
    assert not Path("out").exists()


def test_weights_that_cannot_be_read(folder):
    Path("model/model.safetensors").unlink()
    Path("model/model.safetensors").mkdir()
    assert "model/model.safetensors: Is a directory" in refusal("convert", "hf-to-megatron", "model", "out")


def test_a_target_that_cannot_be_created(folder):
    assert "file/.out.partial: Not a directory; choose another folder" in refusal(
        "convert", "hf-to-megatron", "model", "file/out"
    )
    assert "file already exists" in refusal("convert", "hf-to-megatron", "model", "file")
