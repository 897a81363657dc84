"""The program behind scripts/gpu_smoke.sh."""

import argparse
import sys
import tarfile
from pathlib import Path

from megatron_rl.processes.gpus import GpuQueryError, query_gpus
from scripts.smoke.runner import run_steps
from scripts.smoke.steps import steps

LIMIT_S = 900.0
FAILED, NO_GPU = 1, 2


def main() -> None:
    """Run the steps, show a verdict for each, and pack the logs."""
    parser = argparse.ArgumentParser(prog="gpu_smoke.sh", description="What of this program works on this machine's GPUs.")
    parser.add_argument("--folder", type=Path, default=Path("gpu_smoke"), help="takes logs and runs (default: gpu_smoke)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it (default: 900)")
    arguments = parser.parse_args()

    try:
        gpus, why = query_gpus(), ""
    except GpuQueryError as error:
        gpus, why = (), str(error)
    folder = arguments.folder.resolve()
    wanted = steps(folder, gpus)
    if unknown := sorted(set(arguments.only or ()) - {step.name for step in wanted}):
        parser.error(f"there is no step {', '.join(unknown)} here; there are {', '.join(step.name for step in wanted)}")
    if (folder / "runs").exists():
        parser.error(f"{folder} holds an earlier try; move it away, or name another --folder")
    folder.mkdir(parents=True, exist_ok=True)

    print(", ".join(f"GPU {g.index}: {g.name}" for g in gpus) or f"No GPU here ({why or 'nvidia-smi lists none'}).")
    if not gpus:
        print("The steps that need none run; nothing is said of GPUs.")
    chosen = [step for step in wanted if not arguments.only or step.name in arguments.only]
    verdicts = run_steps(
        chosen,
        folder,
        gpus,
        arguments.limit,
        show=lambda verdict: print(verdict.line, flush=True),
        announce=lambda line: print(line, flush=True),
    )

    packed = folder / "logs.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for file in sorted([*folder.rglob("*.log"), *folder.rglob("metrics.jsonl"), folder / "verdicts.json"]):
            archive.add(file, file.relative_to(folder))
    counts = {kind: sum(v.verdict == kind for v in verdicts) for kind in ("pass", "fail", "skipped")}
    print(f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped; all logs, to send: {packed}")
    if not gpus:
        print("No GPU: the verdict is about the machine-independent steps alone.")
    sys.exit(FAILED if counts["fail"] else (0 if gpus else NO_GPU))


if __name__ == "__main__":
    main()
