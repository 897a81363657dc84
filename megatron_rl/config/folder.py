"""The folder of a run: the path of everything in it, and which process runs the run."""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.reader import load_config, to_toml
from megatron_rl.config.tree import Config
from megatron_rl.errors import accessing


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    It contains lock, config.toml, model/, model_contract.json, quantised_model/, nvfp4_model/, spool/, checkpoints/, logs/,
    metrics.jsonl, tensorboard/, rollouts/, scores/, fingerprints/, replays/, attributions/, status.json, requests/,
    summary.json, export/, and for a job of Slurm job.sbatch, job.json, lives.json and orchestrator.json.
    """

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def lock_file(self) -> Path:
        """Locked by the process that runs the run; its text names that process."""
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
    def quantised_model(self) -> Path:
        """The folder of model.path where its weights are quantised: they are dequantised as they are read."""
        return self.path / "quantised_model"

    @property
    def weights(self) -> Path:
        """What the trainer starts from: the folder with the model's weights."""
        return self.quantised_model if self.quantised_model.exists() else self.model

    @property
    def nvfp4_model(self) -> Path:
        """What servers with NVFP4 layers load: model/ without weights; its config.json lists what is quantised."""
        return self.path / "nvfp4_model"

    @property
    def supervised(self) -> Path:
        """The trainer's state after the supervised start."""
        return self.path / "supervised"

    @property
    def supervised_seal(self) -> Path:
        """What the supervised start was made from; it exists once `supervised` is complete."""
        return self.path / "supervised.json"

    @property
    def checkpoints(self) -> Path:
        """A folder for each checkpoint, step_NNNNNN."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """A log file for each process, and events.jsonl."""
        return self.path / "logs"

    @property
    def metrics_file(self) -> Path:
        """The metrics of every step, one JSON line each."""
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
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def examples(self) -> Path:
        """Readable rollouts, one text file a step."""
        return self.path / "rollouts"

    def scores_file(self, step: int) -> Path:
        """The trainer's log-probs of a few rollouts of a step."""
        return self.path / "scores" / f"step_{step:06d}.safetensors"

    @property
    def status_file(self) -> Path:
        """Progress of the run, rewritten every few seconds."""
        return self.path / "status.json"

    @property
    def job_script(self) -> Path:
        """The batch script that was submitted to Slurm."""
        return self.path / "job.sbatch"

    @property
    def job_file(self) -> Path:
        """The id of the run's job in Slurm."""
        return self.path / "job.json"

    @property
    def attempts_file(self) -> Path:
        """How often in a row the job has begun at the same step."""
        return self.path / "lives.json"

    @property
    def orchestrator_file(self) -> Path:
        """The address of the orchestrator, for the other nodes of a job."""
        return self.path / "orchestrator.json"

    @property
    def requests(self) -> Path:
        """Requests to a running run; see orchestrator/requests.py."""
        return self.path / "requests"

    @property
    def summary_file(self) -> Path:
        """What a finished run reached."""
        return self.path / "summary.json"

    @property
    def export(self) -> Path:
        """The Hugging Face folder written at the end."""
        return self.path / "export"

    def config(self) -> Config:
        """The resolved configuration that the run was started with.

        Raises:
            ConfigError: The folder has no run, or its configuration cannot be read.
        """
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} holds no run ({self.config_file.name} is not there): give the folder of a run, such as runs/NAME"
            )
        return load_config(self.config_file)

    def make(self) -> None:
        """Creates the empty folder, readable by the user alone."""
        with accessing(self.path, "choose another run.folder or run.name"):
            self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)  # also where it existed: its content is nobody else's to read

    def create(self, config: Config) -> None:
        """Creates the folder and writes the resolved configuration, which makes it the folder of a run.

        A former configuration with other values is kept next to it.
        """
        self.make()
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self.requests.mkdir(exist_ok=True, mode=0o700)
        text = to_toml(config)
        if self.config_file.exists() and self.config_file.read_text() != text:
            step, _ = self.latest_checkpoint() or (0, None)
            shutil.copyfile(self.config_file, self.path / f"config.before_step_{step:06d}.toml")
        staging = self.path / ".config.toml.part"
        staging.write_text(text)
        staging.replace(self.config_file)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Within the block, no other process runs the run; the claim ends with the process, however it ends.

        Raises:
            ConfigError: Another process runs it; the message names that process.
        """
        self.make()
        with open(self.lock_file, "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise ConfigError(
                    f"{self.path} is in use by {lock.read().strip() or 'another process'}: stop that run with "
                    f"`megatron-rl stop {self.path}`, or start another run with --run.name OTHER"
                ) from None
            except OSError:
                pass  # a filesystem without locks
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            yield

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after `step` steps."""
        return self.checkpoints / f"step_{step:06d}"

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Steps and folders of the complete checkpoints, oldest first. One that is being written has another name."""
        found = [
            (int(p.name.removeprefix("step_")), p)
            for p in self.checkpoints.glob("step_*")
            if p.name.isascii() and p.name.removeprefix("step_").isdigit()
        ]
        return sorted(found)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint; None where there is none."""
        complete = self.complete_checkpoints()
        return complete[-1] if complete else None


def run_folder(config: Config) -> RunFolder:
    """The folder that a configuration names."""
    return RunFolder(config.run.folder / config.run.name)


def check_startable(folder: RunFolder, resume: bool) -> None:
    """Refuses to start where a run would overwrite something, and to resume where there is no run.

    Raises:
        ConfigError: A new run's folder holds a run or other files, or a resumed run's folder holds no run.
    """
    exists = folder.config_file.exists()
    if exists and not resume:
        raise ConfigError(
            f"{folder.path} already holds a run: add --resume to continue it, or --run.name OTHER to start another one"
        )
    if resume and not exists:
        raise ConfigError(
            f"{folder.path} holds no run to resume: start it without --resume, or give its folder with --run.folder and "
            "--run.name"
        )
    if not exists and folder.path.is_dir() and (foreign := [p.name for p in folder.path.iterdir() if p != folder.lock_file]):
        raise ConfigError(
            f"{folder.path} holds no run, but {', '.join(sorted(foreign)[:5])}: a run needs its own folder; empty it, or choose "
            "another one with --run.name"
        )


def check_own_config(file: Path, folder: RunFolder) -> None:
    """Refuses the configuration of one run that names the folder of another: a copy, or one that was moved.

    Args:
        file: The configuration that a resumed run is started with.
        folder: The folder that it names.

    Raises:
        ConfigError: `file` is in the folder of another run.
    """
    own = RunFolder(file.absolute().parent)
    if file.name == own.config_file.name and own.checkpoints.is_dir() and own.path.resolve() != folder.path.resolve():
        raise ConfigError(
            f"{file} is the configuration of the run in {own.path}, but names {folder.path.absolute()}: to continue the former, "
            f"add --run.folder {own.path.parent} --run.name {own.path.name}; to continue the latter, give its own config.toml"
        )
