"""Tries every published config.json, and writes docs/results/real-model-folders.md: what happened, row by row.

    python scripts/published_table.py [--only NAME ...]

The configurations of model_configs/ with their published config.json, and those of tests/data/published_full.json. A row takes
about a minute on two cores: `check` trains a small copy of the model at the row's own kind of layout.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "real-model-folders.md"
ONE_NODE = [
    "--layout.world_size", "8", "--layout.tensor", "2", "--layout.pipeline", "1", "--layout.virtual_pipeline", "1",
    "--layout.expert", "1",
]  # fmt: skip
LONG = ["--model.max_sequence_length", "65536"]


@dataclass(frozen=True)
class Row:
    """One config.json."""

    name: str
    file: Path
    base: str
    """The file of model_configs whose other values are used."""
    gpus: int
    template: str
    """Its name in tests/unit/tasks/templates.py."""
    overrides: list[str] = field(default_factory=list)
    tokenizer: str = "tokenizer.json is published; not to be had here"


def shipped(name: str, stem: str, gpus: int, template: str, **more: str) -> Row:
    return Row(name, ROOT / "model_configs" / "published" / f"{stem}.json", stem, gpus, template, **more)


def rows(scratch: Path) -> list[Row]:
    made = "by `megatron-rl tokenizer`, proved on a vocabulary learned here (`tests/unit/conversion/test_tokenizer_file.py`)"
    full = json.loads((ROOT / "tests" / "data" / "published_full.json").read_text())

    def published(name: str, base: str, gpus: int, template: str, overrides: list[str] | None = None) -> Row:
        file = scratch / f"{name.replace(' ', '_')}.json"
        file.write_text(json.dumps(full[name]))
        return Row(name, file, base, gpus, template, overrides or [])

    return [
        shipped("Qwen3-30B-A3B", "qwen3-30b-a3b", 24, "qwen3"),
        shipped("Qwen3-235B-A22B", "qwen3-235b-a22b", 1024, "qwen3"),
        published("Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b", 24, "qwen3-coder"),
        published("Qwen3-8B with YaRN of its model card", "qwen3-30b-a3b", 16, "qwen3", [*ONE_NODE, *LONG]),
        published("DeepSeek-R1-0528-Qwen3-8B", "qwen3-30b-a3b", 16, "deepseek-r1", ONE_NODE),
        shipped("DeepSeek-V3", "deepseek-v3", 1024, "deepseek-v3"),
        published("DeepSeek-V3 saved by transformers 4.57", "deepseek-v3", 1024, "deepseek-v3"),
        shipped("Kimi-K2-Instruct", "kimi-k2", 608, "kimi-k2", tokenizer=made),
        shipped("Moonlight-16B-A3B", "moonlight-16b-a3b", 16, "kimi-k2", tokenizer=made),
        shipped("GLM-4.5", "glm-4.5", 160, "glm-4.5"),
        shipped("GLM-4.5-Air", "glm-4.5-air", 64, "glm-4.5"),
        shipped("gpt-oss-120b", "gpt-oss-120b", 80, "gpt-oss"),
        published("gpt-oss-20b", "gpt-oss-120b", 80, "gpt-oss", ONE_NODE),
        shipped("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", 40, "mixtral"),
    ]


def call(row: Row, *words: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "megatron_rl.launch.cli",
        *words,
        "--model.path",
        "not-downloaded",
        "--model.published_config",
    ]
    done = subprocess.run(
        [*command, str(row.file), *row.overrides], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    return done.returncode, done.stdout + done.stderr


def refusal(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    start = next((n for n, line in enumerate(lines) if line.startswith("megatron-rl: ")), max(0, len(lines) - 1))
    return "refused: " + " ".join(lines[start:]).removeprefix("megatron-rl: ").replace("|", "/")


def try_row(row: Row, scratch: Path) -> list[str]:
    base = str(Path("model_configs") / f"{row.base}.toml")
    status, said = call(row, "plan", base, "--gpus", str(row.gpus), "--gpu-type", "h200")
    plan = f"{row.gpus} GPUs: a layout is found" if status == 0 else refusal(said)
    numbers = scratch / "check.json"
    numbers.unlink(missing_ok=True)
    status, said = call(row, "check", base, "--no-server", "--json", str(numbers))
    if not numbers.exists():
        return [plan, refusal(said), "not run: see `check`"]
    stages = {stage["name"]: stage for stage in json.loads(numbers.read_text())["stages"]}
    failed = [name for name, stage in stages.items() if stage["passed"] is False]
    check = f"failed: {', '.join(failed)}" if failed or status else "all stages passed"
    conversion = "there and back equal to the bit" if stages["conversion"]["passed"] else "failed"
    return [plan, check, conversion]


def templates() -> set[str]:
    """Names of the templates that are rendered as by transformers."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "tests/unit/tasks/test_chat_template.py", "-k", "conversations_are"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {line.rpartition("[")[2].rstrip("]") for line in done.stdout.splitlines() if line.startswith("PASSED")}


HEAD = """# Real model folders

After this page you know which published models' files have been tried, and what happened.

Made by `.venv/bin/python scripts/published_table.py`. The config.json of each row is the published one, or says in
`model_configs/published/README.md` how far it is. `plan` is asked for a layout on H200s. `check` (without a server) trains a
copy that keeps the model's features in small, at the row's kind of layout, and compares it with transformers; *conversion* is
its stage that converts this copy there and back. Published templates, tokenizers and weights are not to be had where this was
run: *template* is one written anew with the family's constructs, against transformers' rendering of random conversations;
*tokenizer* says what was tried.

| model | `plan` | `check` | conversion | template | tokenizer |
|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of rows; the page is then printed, not written")
    only = parser.parse_args().only
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        rendered = templates()
        for row in rows(Path(folder)):
            if only and row.name not in only:
                continue
            template = "as transformers" if row.template in rendered else "differs"
            lines.append(f"| {row.name} | {' | '.join([*try_row(row, Path(folder)), template, row.tokenizer])} |")
            print(lines[-1], flush=True)
    if not only:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
