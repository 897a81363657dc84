"""Keys under the names of a former version are read, and the present name is said once."""

from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, load_config, renamed

MINIMAL = """
[run]
name = "r"
steps = 3
[model]
path = "/models/m"
[task]
name = "chain_sum"
"""
LINE = "the key slurm.max_lives_without_checkpoint is now called slurm.max_attempts_without_checkpoint"


@pytest.fixture(autouse=True)
def nothing_was_announced(monkeypatch) -> None:
    monkeypatch.setattr(renamed, "_announced", set())


def write(folder: Path, text: str) -> Path:
    file = folder / "c.toml"
    file.write_text(text)
    return file


def test_a_former_key_is_read_and_its_present_name_is_said_once(tmp_path, capsys) -> None:
    file = write(tmp_path, MINIMAL + "[slurm]\nmax_lives_without_checkpoint = 7\n")
    assert load_config(file).slurm.max_attempts_without_checkpoint == 7
    assert load_config(file, ["--slurm.max-lives-without-checkpoint", "8"]).slurm.max_attempts_without_checkpoint == 8
    assert load_config(file, ["--slurm.max_attempts_without_checkpoint=9"]).slurm.max_attempts_without_checkpoint == 9
    assert capsys.readouterr().err.count(LINE) == 1


def test_a_site_s_profile_may_have_former_keys(tmp_path, capsys) -> None:
    profile = tmp_path / "site.toml"
    profile.write_text("[slurm]\nmax_lives_without_checkpoint = 7\n")
    assert load_config(write(tmp_path, MINIMAL), profile=profile).slurm.max_attempts_without_checkpoint == 7
    assert LINE in capsys.readouterr().err


def test_a_key_under_both_names_is_refused(tmp_path) -> None:
    both = "[slurm]\nmax_lives_without_checkpoint = 7\nmax_attempts_without_checkpoint = 8\n"
    with pytest.raises(ConfigError, match="both are given; remove slurm.max_lives_without_checkpoint"):
        load_config(write(tmp_path, MINIMAL + both))


def test_present_names_are_said_nothing_about(tmp_path, capsys) -> None:
    load_config(write(tmp_path, MINIMAL + "[slurm]\nmax_attempts_without_checkpoint = 7\n"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("former", "present"), renamed.RENAMED_KEYS.items())
def test_present_names_exist(tmp_path, former: str, present: str) -> None:
    tree = load_config(write(tmp_path, MINIMAL)).model_dump()
    for names, there in ((present.split("."), True), (former.split("."), False)):
        section = tree
        for name in names[:-1]:
            section = section[name]
        assert (names[-1] in section) is there
