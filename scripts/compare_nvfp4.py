"""RL with whole weights, with NVFP4 and quantisation-aware training, and with NVFP4 on the servers alone: several seeds of each, one table.

    python scripts/compare_nvfp4.py [--config CONFIG] [--runs FOLDER] [--seeds 1 2 3] [--steps 40] [--json FILE] [--section.key value ...]

All runs begin with the same policy, that of one supervised start (the run `start`), and differ in nothing but the seed and `[precision]`.
They follow one another. A run that is finished is not started again, and one that was broken off goes on, so the same command may be given
until all are there; further words override the configuration, of every run.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from megatron_rl.config import load_config, run_folder

DEMO = Path(__file__).parents[1] / "model_configs" / "tiny-moe-cpu.toml"
ARMS = {
    "whole": [],
    "qat": ["--precision.training", "qat", "--precision.rollouts", "nvfp4"],
    # Probes differ by what the missing training costs: it is what is to be seen, no reason to stop the server.
    "rollouts-alone": ["--precision.rollouts", "nvfp4", "--weight_sync.probe_tolerance", "100.0"],
}
ONLY_THE_RUN = ["--checkpoint.export", "false", "--checkpoint.every", "1000", "--checkpoint.keep", "1"]
COLUMNS = {
    "reward_first10": "reward, first ten steps", "reward_last10": "reward, last ten steps", "entropy_last10": "entropy, last ten steps",
    "abs_dlogp_mean": "mean |dlogp| on probes", "abs_dlogp_max": "largest |dlogp| on probes", "ratio_mean": "mean ratio on probes",
    "train_mismatch_kl_k1": "KL (k1) of training batches", "sync_bytes": "bytes of an update",
}  # fmt: skip


def finish(config: Path, words: list[str]) -> Path:
    """Train, unless that run is finished; its folder."""
    loaded = load_config(config, words)
    folder = run_folder(loaded)
    if steps_done(folder.summary_file) >= loaded.run.steps:
        return folder.path
    begun = folder.config_file.exists()
    command = [str(folder.config_file), "--resume"] if begun else [str(config), *words]
    print(f"{folder.path.name}: {'going on' if begun else 'starting'}", flush=True)
    with open(folder.path.with_suffix(".log"), "a") as log:
        subprocess.run([sys.executable, "-m", "megatron_rl.launch.cli", "train", *command], check=True, stdout=log, stderr=log)
    return folder.path


def steps_done(summary: Path) -> int:
    return json.loads(summary.read_text())["steps"] if summary.exists() else 0


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error over the seeds."""
    return mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def compare(runs: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Mean and standard error of each column by arm, and how far the arms' final rewards are from those of whole weights."""
    table = {arm: {key: spread([run[key] for run in of_arm]) for key in COLUMNS} for arm, of_arm in runs.items()}
    whole, whole_error = table["whole"]["reward_last10"]
    apart = {}
    for arm in ("qat", "rollouts-alone"):
        reward, error = table[arm]["reward_last10"]
        apart[arm] = (reward - whole) / (whole_error**2 + error**2) ** 0.5
    return {"table": table, "final_reward_in_standard_errors": apart, "runs": runs}


def show(result: dict) -> None:
    print(f"{'':30}" + "".join(f"{arm:>26}" for arm in ARMS))
    for key, title in COLUMNS.items():
        cells = (f"{value:.4g} +- {error:.2g}" for value, error in (result["table"][arm][key] for arm in ARMS))
        print(f"{title:30}" + "".join(f"{cell:>26}" for cell in cells))
    for arm, of_arm in result["runs"].items():
        print(f"final rewards, {arm}: " + ", ".join(f"{run['reward_last10']:.3f}" for run in of_arm))
    for arm, distance in result["final_reward_in_standard_errors"].items():
        print(f"final reward of {arm} less that of whole: {distance:+.2f} standard errors of the difference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEMO)
    parser.add_argument("--runs", type=Path, default=Path("runs/nvfp4"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40, help="of RL, in every run")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    asked, overrides = parser.parse_known_args()
    asked.runs.mkdir(parents=True, exist_ok=True)
    every = [*overrides, "--run.folder", str(asked.runs), *ONLY_THE_RUN]
    start = finish(asked.config, [*every, "--run.name", "start", "--run.steps", "1"])
    same = [*every, "--model.path", str(start / "supervised"), "--model.architecture", "none", "--supervised.steps", "0"]
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in asked.seeds:
        for arm, words in ARMS.items():
            named = ["--run.name", f"{arm}-{seed}", "--run.seed", str(seed), "--run.steps", str(asked.steps)]
            folder = finish(asked.config, [*same, *words, *named])
            runs[arm].append(json.loads((folder / "summary.json").read_text()))
    result = compare(runs)
    show(result)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
