"""`megatron-rl launch`: make a batch script of a configuration, and submit it to Slurm."""

import datetime as dt
import itertools
import json
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from megatron_rl.config import (
    Config,
    ConfigError,
    RoleNodes,
    RunFolder,
    changes_on_resume,
    check_own_config,
    check_startable,
    check_tree,
    read_tree,
    run_folder,
)
from megatron_rl.inference.engine import ServerPart
from megatron_rl.launch.local import check_on_any_machine, checked_model
from megatron_rl.launch.slurm import Job, call_slurm, job_of, job_state
from megatron_rl.launch.slurm_job import REQUEUE
from megatron_rl.orchestrator import cluster_plan, server_process
from megatron_rl.processes import DevicePlan, DevicePlanError
from megatron_rl.records import write_atomically
from megatron_rl.wire.control import encode

TEMPLATE = Path(__file__).with_name("job.sbatch.jinja")

LOCAL_FILESYSTEMS = {"btrfs", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


@dataclass(frozen=True)
class Submission:
    """One job."""

    config: Config
    folder: RunFolder
    """Of the job's run."""
    script: str
    changes: tuple[str, ...] = ()
    """In the configuration of a run that is resumed, one line each."""


def submissions(
    path: Path, overrides: Sequence[str], sweeps: Sequence[str], profile: Path | None, resume: bool
) -> list[Submission]:
    """The jobs of a command line, one for each point of the sweep, all of them checked.

    Args:
        path: The configuration file.
        overrides: Words of the command line that change it.
        sweeps: 'section.key=[value, value]', each an axis of the sweep.
        profile: A site's file with a [slurm] section.
        resume: Whether the runs continue from their latest checkpoints.

    Raises:
        ConfigError: A job cannot run as configured.
    """
    found = []
    for words, suffix in points(sweeps):
        config = load_for_cluster(path, [*overrides, *words], profile)
        if suffix:
            name = f"{config.run.name}-{suffix}"
            config = load_for_cluster(path, [*overrides, *words, "--run.name", name], profile)
        folder = RunFolder(run_folder(config).path.absolute())
        check_job(config)
        check_on_any_machine(config)
        check_server_command(config, folder)
        check_startable(folder, resume)
        if resume:
            check_own_config(path, folder)
        changes = changes_on_resume(folder, config) if resume else ()
        found.append(Submission(config, folder, batch_script(config, folder), tuple(changes)))
    return found


def warning_about(folder: RunFolder) -> str | None:
    """A warning where the run's folder may be local to this machine; the job itself checks that its nodes see it."""
    kind = _filesystem_of(folder.path)
    if kind not in LOCAL_FILESYSTEMS:
        return None
    return f"{folder.path} is on {kind}, a filesystem that may be local to this machine: all nodes of the job need run.folder"


def submit(job: Submission) -> str:
    """Write the run's folder, submit the script to Slurm, and return the number of the job.

    Raises:
        ConfigError: sbatch is missing or refuses, or the run's earlier job has not ended.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not in PATH: launch from a login node of the cluster; --dry-run prints the script anywhere")
    if (earlier := job_of(job.folder)) and (state := job_state(earlier)):
        raise ConfigError(f"{job.folder.path}: its job {earlier.number} is {state}; `megatron-rl stop {job.folder.path}` ends it")
    checked_model(job.config)
    is_new = not job.folder.config_file.exists()
    job.folder.create(job.config)
    job.folder.attempts_file.unlink(missing_ok=True)
    job.folder.job_script.write_text(job.script)
    try:
        number = call_slurm("sbatch", "--parsable", "--export=ALL", str(job.folder.job_script)).split(";")[0]
    except BaseException:
        if is_new:  # the name stays free; `submissions` has checked that the folder held nothing
            shutil.rmtree(job.folder.path)
        raise
    write_atomically(job.folder.job_file, encode(Job(number)))
    return number


def load_for_cluster(path: Path, words: Sequence[str], profile: Path | None) -> Config:
    """Load a configuration for the job's nodes. They have other devices than the login node: 'auto' is what [slurm] requests.

    Raises:
        ConfigError: The configuration is not valid.
    """
    tree = read_tree(path, words, profile)
    if isinstance(tree.get("run", {}), dict) and _value_at(tree, "run", "device") in (None, "auto"):
        gpus = _value_at(tree, "slurm", "trainer", "gpus_per_node")
        tree["run"] = {**tree.get("run", {}), "device": "cpu" if gpus == 0 else "cuda"}
    return check_tree(tree, path)


def points(sweeps: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """Overrides and name of every combination.

    From 'a.b=[1, 2]' and 'c.d=[3]': ['--a.b=1', '--c.d=3'] with 'b-1-d-3', and so on.

    Raises:
        ConfigError: An axis is not written as section.key=[value, value], or would give two jobs of one configuration.
    """
    axes = [_axis(sweep) for sweep in sweeps]
    keys = [axis[0][0] for axis in axes]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"--sweep {repeated[0]} is given {keys.count(repeated[0])} times: give all its values in one list")
    for combination in itertools.product(*axes):
        words = [f"--{key}={json.dumps(value)}" for key, value in combination]
        yield words, "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in combination)


def check_job(config: Config) -> None:
    """Check that layout and servers fit the nodes.

    Raises:
        ConfigError: Lists what does not fit.
    """
    broken = [message for message in (_ranks_fit(config), *_servers_fit(config), _devices_agree(config)) if message]
    if not broken:
        try:
            planned_devices(config)
        except DevicePlanError as error:
            broken = str(error).splitlines()
    if broken:
        raise ConfigError("the job is impossible:\n" + "\n".join(f"  {message}" for message in broken))


def check_server_command(config: Config, folder: RunFolder) -> None:
    """Make the command of the first server, as the job will: what the engine refuses is refused before nodes are waited for.

    Raises:
        UnsupportedByEngineError: The engine cannot be started as configured.
    """
    nodes = config.servers.nodes
    part = ServerPart(0, nodes, "127.0.0.1", 0) if nodes > 1 else None
    server_process(config, folder, planned_devices(config), 0, "127.0.0.1", 0, restarts=0, key="", has_moe_layers=True, part=part)


def planned_devices(config: Config) -> DevicePlan:
    """Which GPUs each process gets, on nodes with as many GPUs as [slurm] says, numbered from 0.

    The job makes the same plan of the GPUs that Slurm gives it.

    Raises:
        DevicePlanError: A node has too few GPUs.
    """
    per_node = {
        role: [tuple(map(str, range(nodes.gpus_per_node)))] * nodes.nodes
        for role, nodes in (("trainer", config.slurm.trainer), ("rollouts", config.slurm.rollouts))
    }
    return cluster_plan(config, per_node["trainer"], per_node["rollouts"])


def batch_script(config: Config, folder: RunFolder) -> str:
    """The batch script for sbatch."""
    slurm = config.slurm
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True)
    template = environment.from_string(TEMPLATE.read_text())
    return template.render(
        shared=_shared_options(config, folder),
        trainer=_component(config, slurm.trainer),
        rollouts=_component(config, slurm.rollouts),
        run=shlex.quote(str(folder.path)),
        prologue=slurm.prologue.strip(),
        container=_container_options(config, folder),
        trainer_nodes=slurm.trainer.nodes,
        rollouts_nodes=slurm.rollouts.nodes,
        python=shlex.quote(slurm.python or sys.executable),
        requeue_status=REQUEUE,
        requeue=slurm.requeue,
    )


def _value_at(tree: Any, *keys: str) -> Any:
    """The value at these keys; None where there is none, or where the tree is not valid, which its check will report."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _shared_options(config: Config, folder: RunFolder) -> list[str]:
    """Options of the job; sbatch takes them from before the first component, and reads quotes as a shell does."""
    slurm = config.slurm
    return [
        f"--job-name={config.run.name}",
        shlex.quote(f"--output={folder.logs}/job-%j.log"),
        "--open-mode=append",
        shlex.quote(f"--chdir={Path.cwd()}"),
        "--requeue" if slurm.requeue else "--no-requeue",
        f"--signal=B:USR1@{slurm.signal_before_end_s}",
    ]


def _component(config: Config, nodes: RoleNodes) -> list[str]:
    slurm = config.slurm
    asked = {
        "partition": nodes.partition or slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_limit,
        "constraint": nodes.constraint or slurm.constraint,
        "gpus-per-node": (nodes.gpus_per_node or None) if slurm.request_gpus else None,
    }
    options = [
        f"--nodes={nodes.nodes}",
        "--ntasks-per-node=1",
        "--mem=0",
        "--no-kill",
        *(["--exclusive"] if slurm.exclusive else []),
    ]
    return [*options, *(f"--{name}={value}" for name, value in asked.items() if value is not None), *slurm.arguments]


def _container_options(config: Config, folder: RunFolder) -> str:
    slurm = config.slurm
    if slurm.container_image is None:
        return ""
    here = str(Path.cwd())
    mounts = [f"{place}:{place}" for place in dict.fromkeys((here, str(folder.path)))] + slurm.container_mounts
    options = [
        f"--container-image={slurm.container_image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={here}",
    ]
    return " ".join(shlex.quote(option) for option in options)


def _ranks_fit(config: Config) -> str | None:
    ranks, t = config.layout.world_size, config.slurm.trainer
    if ranks % t.nodes:
        return f"layout.world_size = {ranks} is not a multiple of slurm.trainer.nodes = {t.nodes}: every node has as many ranks"
    return None


def _servers_fit(config: Config) -> Iterator[str]:
    s, r = config.servers, config.slurm.rollouts
    if r.nodes % s.nodes:
        yield (
            f"slurm.rollouts.nodes = {r.nodes} is not a multiple of servers.nodes = {s.nodes}: the nodes are divided into groups "
            f"of {s.nodes}, which servers span; use {-(-r.nodes // s.nodes) * s.nodes}"
        )
    if s.count * s.nodes < r.nodes:
        yield (
            f"servers.count = {s.count} x servers.nodes = {s.nodes} is below slurm.rollouts.nodes = {r.nodes}: some nodes would "
            "be idle"
        )
    if r.gpus_per_node and s.tensor > s.nodes * r.gpus_per_node:
        yield (
            f"servers.tensor = {s.tensor} is above servers.nodes x slurm.rollouts.gpus_per_node = {s.nodes} x {r.gpus_per_node}: "
            f"a server has one GPU for each tensor-parallel rank; raise servers.nodes to {-(-s.tensor // r.gpus_per_node)}"
        )
    if s.first_port:
        yield f"servers.first_port = {s.first_port}: on a cluster, servers take free ports; leave it 0"


def _devices_agree(config: Config) -> str | None:
    t, r = config.slurm.trainer.gpus_per_node, config.slurm.rollouts.gpus_per_node
    if bool(t) != bool(r):
        return f"slurm.trainer.gpus_per_node = {t} and slurm.rollouts.gpus_per_node = {r}: either both roles have GPUs or neither"
    if (config.device == "cuda") != bool(t):
        return f"run.device = '{config.device}' with gpus_per_node = {t}"
    return None


def _filesystem_of(path: Path) -> str:
    """The type of a path's filesystem in /proc/self/mounts; the path need not exist yet."""
    mounts = {
        fields[1]: fields[2] for line in Path("/proc/self/mounts").read_text().splitlines() if len(fields := line.split()) > 2
    }
    return next((mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts), "")


def _axis(sweep: str) -> list[tuple[str, Any]]:
    key, equals, text = sweep.removeprefix("--").partition("=")
    try:
        values = tomllib.loads(f"value = {text}")["value"] if equals else None
    except tomllib.TOMLDecodeError:
        values = None
    if "." not in key or not isinstance(values, list) or not values:
        raise ConfigError(
            f"--sweep {sweep}: write --sweep 'section.key=[value, value]', for example 'optimizer.learning_rate=[1e-6, 3e-6]'"
        )
    if foreign := [value for value in values if isinstance(value, dt.date | dt.time)]:
        raise ConfigError(f"--sweep {sweep}: {foreign[0]} is a date or a time to TOML; write it in quotes, '\"{foreign[0]}\"'")
    texts = [str(value) for value in values]
    if repeated := sorted({text for text in texts if texts.count(text) > 1}):
        raise ConfigError(f"--sweep {sweep}: has {repeated[0]} more than once; each value makes a job, and its run's name")
    return [(key.replace("-", "_"), value) for value in values]
