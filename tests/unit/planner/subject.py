"""Published models and a workload for the planner's tests."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.planner import ParameterCounts, Workload

ROOT = Path(__file__).parents[3]
PUBLISHED: dict[str, dict[str, Any]] = {
    name: entry["config"] for name, entry in json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text()).items()
}
WORK = Workload(
    longest_sequence=16384, mean_prompt=500, mean_response=6000, num_sequences=512, samples_per_prompt=8, max_num_seqs=128
)  # fmt: skip


@cache
def counts_of(name: str) -> ParameterCounts:
    return ParameterCounts(PUBLISHED[name])
