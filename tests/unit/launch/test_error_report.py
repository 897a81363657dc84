"""How a command ends on an error of each kind: what the terminal shows, where the traceback is, the exit status."""

import errno
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_rl.config import RunFolder
from megatron_rl.errors import FileAccessError, RunError, UserError, accessing
from megatron_rl.launch.cli import app
from megatron_rl.launch.error_report import reporting_errors


def fail(error: BaseException, run: RunFolder | None) -> None:
    with reporting_errors() as report:
        report.run = run
        raise error


def ended(capsys, error: BaseException, run: RunFolder | None = None) -> tuple[int, str]:
    """Exit status and what the terminal shows."""
    with pytest.raises(typer.Exit) as caught:
        fail(error, run)
    return caught.value.exit_code, capsys.readouterr().err


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    return folder


def test_an_error_of_the_user_is_its_message_alone(capsys, run):
    assert ended(capsys, UserError("steps = -1: 1 or more"), run) == (2, "megatron-rl: steps = -1: 1 or more\n")
    assert not list(run.logs.iterdir())


def test_a_failed_run_names_its_logs(capsys, run):
    status, text = ended(capsys, RunError("trainer-0 ended with status 1"), run)
    assert status == 1 and text == f"megatron-rl: the run failed: trainer-0 ended with status 1\nlogs: {run.logs}\n"


def test_an_unexpected_error_is_one_line_and_its_traceback_is_in_the_runs_log(capsys, run):
    status, text = ended(capsys, KeyError("layers"), run)
    assert status == 1 and text.count("\n") == 1
    assert text == f"megatron-rl: unexpected KeyError: 'layers'. Traceback: {run.logs / 'error.log'}\n"
    ended(capsys, ZeroDivisionError("by zero"), run)
    log = (run.logs / "error.log").read_text()
    assert "KeyError: 'layers'" in log and "ZeroDivisionError: by zero" in log and "in fail" in log
    run.config_file.touch()
    assert "ZeroDivisionError" in CliRunner().invoke(app, ["logs", str(run.path), "error"]).output


def test_without_a_run_the_traceback_is_in_a_temporary_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for run in (None, RunFolder(tmp_path / "nowhere")):
        _, text = ended(capsys, KeyError("layers"), run)
        file = Path(text.rpartition("Traceback: ")[2].strip())
        assert file.parent == tmp_path and "in fail" in file.read_text() and file.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "nowhere").exists()


def test_where_no_file_can_be_written_the_traceback_is_shown(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr("tempfile.mkstemp", full)
    _, text = ended(capsys, KeyError("layers"))
    assert "unexpected KeyError" in text and "in fail" in text


def test_ctrl_c_and_a_closed_pipe_are_not_reported():
    for error in (KeyboardInterrupt(), BrokenPipeError(), typer.Exit(3)):
        with pytest.raises(type(error)), reporting_errors():
            raise error


def test_a_command_that_meets_a_bug_ends_so(monkeypatch, tmp_path):
    monkeypatch.setattr("megatron_rl.launch.cli.load_config", lambda *_: {}["layers"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["train", "some.toml"])
    assert result.exit_code == 1 and "unexpected KeyError: 'layers'" in result.output and "some.toml" not in result.output


def test_a_file_that_cannot_be_accessed_is_named_with_the_remedy(tmp_path):
    with pytest.raises(FileAccessError) as caught, accessing(tmp_path, "choose another"):
        (tmp_path / "nowhere" / "x").write_text("")
    assert str(caught.value) == f"{tmp_path / 'nowhere' / 'x'}: No such file or directory; choose another"
    with pytest.raises(FileAccessError, match=f"{tmp_path}: disk quota"), accessing(tmp_path):
        raise OSError("disk quota")
    with pytest.raises(UserError, match="as it is"), accessing(tmp_path):
        raise UserError("as it is")


def test_a_disk_that_refuses_is_the_users_wherever_it_is_met(capsys, run):
    assert ended(capsys, OSError(errno.ENOSPC, "No space left on device", "/scratch/x"), run) == (
        2,
        "megatron-rl: /scratch/x: No space left on device\n",
    )
    status, text = ended(capsys, FileNotFoundError(errno.ENOENT, "No such file or directory", "/scratch/x"), run)
    assert status == 1 and text.startswith("megatron-rl: unexpected FileNotFoundError: ") and "error.log" in text


def test_a_value_error_is_not_the_users(capsys, run):
    assert ended(capsys, ValueError("not a .npy file"), run)[0] == 1


def test_a_fault_of_a_run_that_is_an_os_error_stays_one(capsys, run):
    class BrokenSpoolError(RunError, OSError):
        pass

    assert ended(capsys, BrokenSpoolError("a payload is missing"), run)[1].startswith("megatron-rl: the run failed: a payload")
