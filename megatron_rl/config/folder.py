"""The folder of a run: where each thing lies, and who works in it."""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.reader import ConfigError, load_config, to_toml
from megatron_rl.config.tree import Config


@dataclass(frozen=True)
class RunFolder:
    """RUN/: lock, config.toml, model/, model_contract.json, nvfp4_model/, spool/, checkpoints/, logs/, metrics.jsonl, tensorboard/, rollouts/, scores/, fingerprints/, replays/,
    attributions/, status.json, requests/, summary.json, export/, and of a job job.sbatch, job.json, lives.json, orchestrator.json."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def lock_file(self) -> Path:
        """Locked by the process that runs the run, which it names."""
        return self.path / "lock"

    @property
    def model(self) -> Path:
        """What the servers load: config.json, tokenizer, and weights unless the model starts from random ones."""
        return self.path / "model"

    @property
    def model_contract(self) -> Path:
        """What rollouts of the model look like: vocabulary, MoE layers, experts. See records.ModelContract."""
        return self.path / "model_contract.json"

    @property
    def nvfp4_model(self) -> Path:
        """What servers with NVFP4 layers are built from: model/ without weights, whose config.json says what is quantised."""
        return self.path / "nvfp4_model"

    @property
    def supervised(self) -> Path:
        """The trainer's state after the supervised start."""
        return self.path / "supervised"

    @property
    def supervised_seal(self) -> Path:
        """What made the supervised start; there once `supervised` is whole."""
        return self.path / "supervised.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def fingerprints(self) -> Path:
        """Checksums of the trainer's state after each step."""
        return self.path / "fingerprints"

    @property
    def replays(self) -> Path:
        """A folder for each `megatron-rl replay`: its configuration, logs and report."""
        return self.path / "replays"

    @property
    def attributions(self) -> Path:
        """A folder for each `megatron-rl attribute`: configurations, logs and scores."""
        return self.path / "attributions"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def examples(self) -> Path:
        """Rollouts that one can read, a text file a step."""
        return self.path / "rollouts"

    def scores_file(self, step: int) -> Path:
        """The trainer's log-probs of a few rollouts of a step."""
        return self.path / "scores" / f"step_{step:06d}.safetensors"

    @property
    def status_file(self) -> Path:
        """Where the run stands, rewritten every few seconds."""
        return self.path / "status.json"

    @property
    def job_script(self) -> Path:
        """What was submitted to Slurm."""
        return self.path / "job.sbatch"

    @property
    def job_file(self) -> Path:
        """Which job of Slurm the run is."""
        return self.path / "job.json"

    @property
    def attempts_file(self) -> Path:
        """How often in a row the job has begun at the same step."""
        return self.path / "lives.json"

    @property
    def orchestrator_file(self) -> Path:
        """Where the nodes of a job find the orchestrator."""
        return self.path / "orchestrator.json"

    @property
    def requests(self) -> Path:
        """What is asked of the run while it goes on; see orchestrator/requests.py."""
        return self.path / "requests"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def export(self) -> Path:
        """The Hugging Face folder written at the end."""
        return self.path / "export"

    def config(self) -> Config:
        """The resolved configuration that the run was started with. ConfigError where none lies here."""
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} holds no run ({self.config_file.name} is not there): name the folder of one, such as runs/NAME"
            )
        return load_config(self.config_file)

    def make(self) -> None:
        """The empty folder, private to the user."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)  # whatever made it: what lies in it is nobody else's to read

    def create(self, config: Config) -> None:
        """Make the folder and write the resolved configuration: from here on it holds a run. A former configuration that said otherwise
        stays beside it."""
        self.make()
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self.requests.mkdir(exist_ok=True, mode=0o700)
        text = to_toml(config)
        if self.config_file.exists() and self.config_file.read_text() != text:
            step, _ = self.latest_checkpoint() or (0, None)
            shutil.copyfile(self.config_file, self.path / f"config.before_step_{step:06d}.toml")
        aside = self.path / ".config.toml.part"
        aside.write_text(text)
        aside.replace(self.config_file)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside, this process alone runs the run; the claim ends with the process, however it ends. Raises ConfigError that names who
        holds it."""
        self.make()
        with open(self.lock_file, "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise ConfigError(
                    f"{self.path} is in use by {lock.read().strip() or 'another process'}: `megatron-rl stop {self.path}` ends that run, "
                    "--run.name OTHER starts another one"
                ) from None
            except OSError:
                pass  # a filesystem without locks
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            yield

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def whole_checkpoints(self) -> list[tuple[int, Path]]:
        """Steps and folders of the finished checkpoints, oldest first. A half-written one carries another name."""
        found = [
            (int(p.name.removeprefix("step_")), p)
            for p in self.checkpoints.glob("step_*")
            if p.name.removeprefix("step_").isdigit()
        ]
        return sorted(found)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        whole = self.whole_checkpoints()
        return whole[-1] if whole else None


def run_folder(config: Config) -> RunFolder:
    return RunFolder(config.run.folder / config.run.name)


def check_startable(folder: RunFolder, resume: bool) -> None:
    """Raise ConfigError when a new run would overwrite an old one or what else lies in its folder, or when there is nothing to resume."""
    exists = folder.config_file.exists()
    if exists and not resume:
        raise ConfigError(f"{folder.path} holds a run already: --resume goes on with it, --run.name OTHER starts another")
    if resume and not exists:
        raise ConfigError(
            f"{folder.path} holds no run to resume: start it without --resume, or name its folder with --run.folder and --run.name"
        )
    if not exists and folder.path.is_dir() and (foreign := [p.name for p in folder.path.iterdir() if p != folder.lock_file]):
        raise ConfigError(
            f"{folder.path} holds no run, but {', '.join(sorted(foreign)[:5])}: a run takes a folder of its own; "
            "empty it, or choose another by --run.name"
        )


def check_own_config(file: Path, folder: RunFolder) -> None:
    """Raise ConfigError where `file` is the configuration of one run and names the folder of another: a copy, or one that was moved."""
    own = RunFolder(file.absolute().parent)
    if file.name == own.config_file.name and own.checkpoints.is_dir() and own.path.resolve() != folder.path.resolve():
        raise ConfigError(
            f"{file} is the configuration of the run in {own.path}, but names {folder.path.absolute()}: to go on in the former, "
            f"add --run.folder {own.path.parent} --run.name {own.path.name}; to go on in the latter, give that one's config.toml"
        )
