"""`megatron-rl launch` up to what sbatch gets, and what is refused before that.

Not proved here: that Slurm takes it (tests/e2e).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.config import RunFolder
from megatron_rl.launch.cli import app
from megatron_rl.launch.slurm import job_of
from megatron_rl.launch.slurm_job import count_attempt
from megatron_rl.launch.submit import points, warning_about

CONFIG = str(Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml")
TWO_NODES = ["--servers.tensor", "2", "--servers.nodes", "2", "--slurm.rollouts.nodes", "2"]
GPUS = ["--slurm.trainer.gpus_per_node", "8", "--slurm.rollouts.gpus_per_node", "8"]


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def script(tmp_path, *words: str) -> str:
    result = invoke("launch", CONFIG, "--dry-run", "--run.folder", str(tmp_path), *words)
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.glob("tiny*"))
    return result.stdout


def of_component(text: str, number: int) -> str:
    return text.partition("umask")[0].split("#SBATCH hetjob")[number]


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A stand-in that keeps its input and prints a number, as sbatch --parsable does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\ncat "$3" >> {tmp_path}/submitted\necho 4{os.getpid() % 10}7\n')
    (folder / "squeue").write_text("#!/bin/sh\n")
    for program in folder.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("megatron_rl.launch.submit.checked_model", lambda config: {})  # loads torch in its own process
    return tmp_path / "submitted"


def test_the_dry_run_prints_exactly_what_is_submitted(tmp_path, sbatch):
    printed = script(tmp_path)
    result = invoke("launch", CONFIG, "--run.folder", str(tmp_path))
    assert result.exit_code == 0, result.output
    folder = RunFolder(tmp_path / "tiny-moe-cpu")
    assert printed == sbatch.read_text() == folder.job_script.read_text()
    assert f"job {job_of(folder).number}" in result.output
    assert folder.config().run.device == "cpu"  # as the nodes are, whatever the login node is
    again = invoke("launch", CONFIG, "--run.folder", str(tmp_path))
    assert again.exit_code == 2 and "--resume" in again.output
    assert invoke("launch", CONFIG, "--run.folder", str(tmp_path), "--resume").exit_code == 0


def test_bash_reads_the_script(tmp_path):
    words = [
        "--slurm.prologue",
        "'''module load cuda\nexport A=\"b c\"'''",
        "--slurm.container_image",
        "/images/a b.sqsh",
        "--run.name",
        "x",
    ]
    text = script(tmp_path / "with space", *words)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""
    assert 'module load cuda\nexport A="b c"' in text
    assert f"RUN='{tmp_path}/with space/x'" in text and f"#SBATCH '--output={tmp_path}/with space/x/logs/job-%j.log'\n" in text
    assert "'--container-image=/images/a b.sqsh'" in text and f"--container-workdir={Path.cwd()}" in text


def test_each_role_gets_its_nodes(tmp_path):
    words = [
        *GPUS,
        "--slurm.trainer.nodes",
        "2",
        "--layout.world_size",
        "16",
        "--slurm.rollouts.nodes",
        "3",
        "--servers.count",
        "6",
        "--servers.tensor",
        "4",
        "--slurm.partition",
        "batch",
        "--slurm.rollouts.partition",
        "inference",
        "--slurm.account",
        "lab",
        "--slurm.qos",
        "high",
        "--slurm.time_limit",
        "1-12:00:00",
        "--slurm.rollouts.constraint",
        "h100&nvme",
        "--slurm.signal_before_end_s",
        "900",
        "--slurm.arguments",
        '["--reservation=r"]',
    ]
    text = script(tmp_path, *words)
    trainer, rollouts = of_component(text, 0), of_component(text, 1)
    for component, expected in (
        (trainer, ("--nodes=2", "--partition=batch")),
        (rollouts, ("--nodes=3", "--partition=inference", "--constraint=h100&nvme")),
    ):
        for option in (
            *expected,
            "--gpus-per-node=8",
            "--account=lab",
            "--qos=high",
            "--time=1-12:00:00",
            "--reservation=r",
            "--exclusive",
        ):
            assert f"#SBATCH {option}\n" in component, (option, component)
    assert "--signal=B:USR1@900" in trainer and "constraint" not in trainer
    assert "--het-group=1 --nodes=3 --ntasks=3" in text


def test_what_a_site_does_not_want_is_left_out(tmp_path):
    text = script(tmp_path, *GPUS, "--slurm.request_gpus", "false", "--slurm.exclusive", "false", "--slurm.requeue", "false")
    assert "gpus-per-node" not in text and "--exclusive" not in text and "scontrol requeue" not in text and "--no-requeue" in text


def test_a_profile_is_overridden_by_the_run(tmp_path):
    profile = tmp_path / "site.toml"
    profile.write_text('[slurm]\naccount = "lab"\npartition = "slow"\n[slurm.rollouts]\nconstraint = "h100"\ngpus_per_node = 4\n')
    text = script(tmp_path / "runs", "--profile", str(profile), "--slurm.partition", "fast")
    assert "--account=lab" in text and "--partition=fast" in text and "slow" not in text
    assert "--constraint=h100" in of_component(text, 1) and "--constraint" not in of_component(text, 0)
    assert "gpus" not in text  # the file's 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[slurm]\nacount = "lab"', "slurm.acount: unknown key; did you mean account?"),
        ("[slurm.trainer]\nnode = 2", "slurm.trainer.node: unknown key; did you mean nodes?"),
        ("[run]\nsteps = 2", "run: unknown key"),
        ("[slurm", "not valid TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_profile_is_named(tmp_path, text, expected):
    profile = tmp_path / "site.toml"
    if text is not None:
        profile.write_text(text)
    result = invoke("launch", CONFIG, "--dry-run", "--profile", str(profile))
    assert result.exit_code == 2 and f"{profile}" in result.output and expected in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--slurm.trainer.nodes", "3"], "layout.world_size = 2 is not a multiple of slurm.trainer.nodes = 3"),
        ([*GPUS, "--layout.world_size", "16"], "trainer node 0 has 8 GPUs for this run, and 16 are needed there"),
        (["--slurm.rollouts.nodes", "2"], "servers.count = 1 x servers.nodes = 1 is below slurm.rollouts.nodes = 2"),
        ([*GPUS, "--servers.tensor", "16"], "each tensor-parallel rank; raise servers.nodes to 2"),
        (
            [*GPUS, "--servers.tensor", "16", "--servers.nodes", "2", "--slurm.rollouts.nodes", "3", "--servers.count", "2"],
            "slurm.rollouts.nodes = 3 is not a multiple of servers.nodes = 2",
        ),
        (
            [*GPUS, "--servers.tensor", "16", "--servers.nodes", "2", "--slurm.rollouts.nodes", "4"],
            "servers.count = 1 x servers.nodes = 2 is below slurm.rollouts.nodes = 4",
        ),
        (
            [*TWO_NODES, "--servers.extra_arguments", '["-dp", "2"]'],
            "servers.nodes = 2 with 2 data-parallel replicas in servers.extra_arguments",
        ),
        (["--servers.tensor", "3", "--servers.nodes", "2"], "servers.tensor = 3 is not a multiple of servers.nodes = 2"),
        (
            [*GPUS, "--servers.count", "3", "--servers.tensor", "4"],
            "rollouts node 0 has 8 GPUs for this run, and 12 are needed there",
        ),
        (["--servers.first_port", "8000"], "on a cluster, servers take free ports"),
        (["--slurm.trainer.gpus_per_node", "8"], "either both roles have GPUs or neither"),
        ([*GPUS, "--run.device", "cpu"], "run.device = 'cpu' with gpus_per_node = 8"),
        (["--slurm.time_limit", "4h"], "slurm.time_limit"),
        (["--slurm.partition", "x\n#SBATCH --wrap=evil"], "slurm.partition"),
        (["--slurm.account", "a b; $(touch x)"], "slurm.account"),
        (["--slurm.arguments", '["--nice", "--comment=a b"]'], "slurm.arguments"),
        (["--slurm.trainer.gpus", "8"], "slurm.trainer.gpus: unknown key; this section has: nodes, gpus_per_node"),
        (["--sweep", "optimizer.learning_rate=3"], "write --sweep"),
        (["--sweep", "optimizer.learning_rat=[3.0]"], "did you mean learning_rate?"),
        (["--sweep", "run.steps=[1]", "--sweep", "run.steps=[2]"], "--sweep run.steps is given 2 times"),
        (["--sweep", "run.steps=[1, 1]"], "has 1 more than once"),
        (["--sweep", "run.name=[2026-01-01]"], "2026-01-01 is a date or a time to TOML; write it in quotes"),
        (["--sweep", "slurm.time_limit=[04:00:00]"], "04:00:00 is a date or a time to TOML; write it in quotes"),
        (["--task.name", "nope"], "nope"),
        (["--task.reward", "nope:f"], "nope"),
        (["--task.answer_template", "{nope}"], "task.answer_template"),
        (["--servers.extra_arguments", '["--nnodes", "2"]'], "servers.extra_arguments has --nnodes"),
        (["--servers.extra_arguments", '["--data-parallel-rank", "0"]'], "servers.extra_arguments has --data-parallel-rank"),
        (
            [*GPUS, *TWO_NODES, "--servers.extra_arguments", '["--pipeline-parallel-size", "2"]'],
            "servers.nodes = 2 with 2 pipeline stages in servers.extra_arguments",
        ),
        (["--run.name", "x" * 300], "run.name"),
        (["--run.folder", '"\\u0000"'], "folder has a NUL character"),
        (["--run.seed", "4294967296"], "run.seed"),
        (["--run.steps", "true"], "true is no number; give an integer"),
        (["--resume"], "holds no run to resume"),
    ],
)
def test_what_is_impossible_is_refused(tmp_path, words, expected):
    result = invoke("launch", CONFIG, "--dry-run", "--run.folder", str(tmp_path), *words)
    assert result.exit_code == 2 and expected in result.output, result.output


def test_without_slurm_there_is_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    result = invoke("launch", CONFIG, "--run.folder", str(tmp_path))
    assert result.exit_code == 2 and "sbatch is not in PATH" in result.output and not list(tmp_path.iterdir())


def test_the_model_is_checked_before_anything_is_submitted(tmp_path, sbatch, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    result = invoke("launch", CONFIG, "--run.folder", str(tmp_path), "--layout.world_size", "16", "--layout.expert", "16")
    assert result.exit_code == 2 and "num_experts = 8 is not a multiple of ep = 16" in result.output
    assert not sbatch.exists() and not (tmp_path / "tiny-moe-cpu").exists()


def test_the_message_of_sbatch_is_shown(tmp_path, sbatch):
    (Path(os.environ["PATH"].split(":")[0]) / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: fast' >&2\nexit 1\n"
    )
    result = invoke("launch", CONFIG, "--run.folder", str(tmp_path), "--slurm.partition", "fast")
    assert result.exit_code == 2 and "invalid partition specified: fast" in result.output
    assert not (tmp_path / "tiny-moe-cpu").exists()  # the name stays free


def test_a_time_limit_without_quotes_is_no_time_of_day(tmp_path):
    assert "#SBATCH --time=04:30:00\n" in script(tmp_path, "--slurm.time_limit", "04:30:00")


def test_a_section_that_is_no_table_is_named(tmp_path):
    (tmp_path / "run.toml").write_text("run = 5\n")
    result = invoke("launch", str(tmp_path / "run.toml"), "--dry-run")
    assert result.exit_code == 2 and "run" in result.output, result.output


def test_a_sweep_is_a_job_for_each_point(tmp_path, sbatch):
    words = ["--sweep", "optimizer.learning_rate=[1e-4, 3e-4]", "--sweep", "rollouts.top_p=[0.9, 1.0]"]
    result = invoke("launch", CONFIG, "--run.folder", str(tmp_path), *words)
    assert result.exit_code == 0, result.output
    runs = {path.name: RunFolder(path).config() for path in tmp_path.glob("tiny-*")}
    assert sorted((c.optimizer.learning_rate, c.rollouts.top_p) for c in runs.values()) == [
        (1e-4, 0.9),
        (1e-4, 1.0),
        (3e-4, 0.9),
        (3e-4, 1.0),
    ]
    assert (
        "tiny-moe-cpu-learning_rate-0.0001-top_p-0.9" in runs
        and sbatch.read_text().count("#SBATCH --job-name=tiny-moe-cpu-") == 4
    )


def test_a_run_whose_job_has_not_ended_is_not_submitted_again(tmp_path, sbatch):
    assert invoke("launch", CONFIG, "--run.folder", str(tmp_path)).exit_code == 0
    number = job_of(RunFolder(tmp_path / "tiny-moe-cpu")).number
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\necho '{number}+0 PENDING'\n")
    result = invoke("launch", CONFIG, "--run.folder", str(tmp_path), "--resume")
    assert result.exit_code == 2 and f"its job {number} is PENDING" in result.output


def test_a_resumed_job_lists_what_has_changed(tmp_path, sbatch):
    assert invoke("launch", CONFIG, "--run.folder", str(tmp_path)).exit_code == 0
    own = str(tmp_path / "tiny-moe-cpu" / "config.toml")
    result = invoke("launch", own, "--resume", "--rollouts.top_p", "0.5")
    assert result.exit_code == 0 and result.output.count("changed: ") == 1 and "changed: rollouts.top_p: " in result.output
    result = invoke("launch", own, "--resume", "--model.architecture.num_experts", "4")
    assert result.exit_code == 2 and "with another model, which --resume cannot change" in result.output
    result = invoke("launch", own, "--resume", "--run.name", "other")
    assert result.exit_code == 2 and sbatch.read_text().count("#SBATCH --job-name") == 2


@pytest.mark.parametrize(("place", "warns"), [("/proc/x/y", False), ("/", True)])
def test_a_folder_of_this_machine_alone_is_pointed_out(monkeypatch, place, warns):
    monkeypatch.setattr("megatron_rl.launch.submit._filesystem_of", lambda path: {"/": "ext4"}.get(str(path), "nfs4"))
    assert bool(warning_about(RunFolder(Path(place)))) == warns


def test_points_without_a_sweep_are_one():
    assert list(points([])) == [([], "")]
    assert list(points(["--a.b-c=['x', true]"])) == [(['--a.b_c="x"'], "b_c-x"), (["--a.b_c=true"], "b_c-True")]


def test_a_job_that_gets_nowhere_stops_requeueing_itself(tmp_path):
    folder = RunFolder(tmp_path)
    for _ in range(2):
        count_attempt(folder, most=2)
    with pytest.raises(ValueError, match="have all begun at step 0"):
        count_attempt(folder, most=2)
    folder.checkpoint(7).mkdir(parents=True)
    count_attempt(folder, most=2)
    assert json.loads(folder.attempts_file.read_text()) == {"step": 7, "lives": 1}


def test_neither_the_users_preferences_nor_an_outer_jobs_variables_reach_slurms_commands(tmp_path, sbatch, monkeypatch):
    """sbatch's own stay, but for its export; what stays is printed."""
    outer = {
        "SLURM_JOB_ID": "9",
        "SLURM_NTASKS_PER_NODE": "3",
        "SLURM_EXPORT_ENV": "NONE",
        "SQUEUE_STATES": "PD",
        "SCANCEL_VERBOSE": "1",
    }
    kept = {"SBATCH_ACCOUNT": "lab", "SLURM_CONF": "/etc/slurm/own.conf", "MY_OWN": "x"}
    for name, value in {**outer, **kept, "SBATCH_EXPORT": "NONE"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin" / "sbatch").write_text(f'#!/bin/sh\nenv > {tmp_path}/seen\necho "$*" >> {tmp_path}/seen\necho 47\n')
    result = invoke("launch", CONFIG, "--run.folder", str(tmp_path))
    assert result.exit_code == 0 and "from the environment, for sbatch: SBATCH_ACCOUNT=lab" in result.output
    seen = (tmp_path / "seen").read_text()
    assert not [name for name in (*outer, "SBATCH_EXPORT") if f"\n{name}=" in seen]
    assert all(f"{name}={value}\n" in seen for name, value in kept.items()) and "--parsable --export=ALL " in seen
    text = RunFolder(tmp_path / "tiny-moe-cpu").job_script.read_text()
    assert text.count("srun") >= 1 and "step=(setsid srun --export=ALL " in text


def test_a_job_whose_state_nobody_knows_is_not_taken_for_ended(tmp_path, sbatch):
    assert invoke("launch", CONFIG, "--run.folder", str(tmp_path)).exit_code == 0
    number = job_of(RunFolder(tmp_path / "tiny-moe-cpu")).number

    def resume(squeue: str):
        (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
        return invoke("launch", CONFIG, "--run.folder", str(tmp_path), "--resume")

    hidden = resume(f'case "$*" in *--jobs={number}*) echo "{number}+0 RUNNING";; esac')
    assert hidden.exit_code == 2 and f"its job {number} is RUNNING" in hidden.output
    down = resume('case "$*" in *--jobs*) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1;; esac')
    assert down.exit_code == 2 and "Unable to contact slurm controller" in down.output
    forgotten = resume('case "$*" in *--jobs*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; esac')
    assert forgotten.exit_code == 0
