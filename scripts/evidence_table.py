"""Prints the table of scripts/evidence.sh, of the runs that are finished.

    python scripts/evidence_table.py runs/evidence --arms a,b,c --seeds 1,2,3 --steps 100

A run is finished when its metrics.jsonl holds all steps. The others are named below the table, and the exit status is then 1.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from megatron_rl.config import RunFolder
from megatron_rl.metrics import Row, arms_table, read_rows

ARMS = {
    "a": "(a) top_p = 1",
    "b": "(b) no keep-set replay",
    "c": "(c) keep-set replay",
    "d": "(d) = (c), Muon",
    "e": "(e) = (c), no routing replay",
    "f": "(f) = (c), NVFP4 and QAT",
    "g": "(g) = (c), NVFP4 without QAT",
    "h": "(h) = (f), experts alone",
}


def finished_rows(folder: Path, steps: int) -> list[Row] | None:
    """The training rows of a run; None while there are fewer than `steps`."""
    file = RunFolder(folder).metrics_file
    rows = read_rows(file) if file.exists() else []
    return rows if len(rows) >= steps else None


def some_arms(text: str) -> list[str]:
    arms = text.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise argparse.ArgumentTypeError(f"unknown arm {', '.join(map(repr, unknown))}; use {', '.join(ARMS)}")
    return arms


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evidence_table.py", description="Prints the arms of the experiment side by side.")
    parser.add_argument("folder", type=Path, help="has a folder for each run: a-seed1, ...")
    parser.add_argument("--arms", default=",".join(ARMS), type=some_arms)
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: text.split(","))
    parser.add_argument("--steps", required=True, type=int, help="of a finished run")
    args = parser.parse_args(argv)
    runs = {arm: {seed: finished_rows(args.folder / f"{arm}-seed{seed}", args.steps) for seed in args.seeds} for arm in args.arms}
    table = arms_table({ARMS[arm]: [rows for rows in of_arm.values() if rows] for arm, of_arm in runs.items()})
    Console(width=None if sys.stdout.isatty() else 300).print(table)
    missing = [f"{arm}-seed{seed}" for arm, of_arm in runs.items() for seed, rows in of_arm.items() if not rows]
    if missing:
        print("not finished: " + ", ".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
