"""A small run that version 0.1.0 recorded, before its words changed: what a user of that version has on disk.

tests/data/recorded_run.tar.xz: model_configs/evidence-cpu.toml made smaller (4 experts, 2 layers, hidden size 32), two ranks at
EP 2, five steps with fingerprints, the checkpoint before step 4. Made on Python 3.11 with Megatron-Core 0.16.1, on
CPU_OF_THE_RECORD.
"""

import tarfile
from pathlib import Path

from megatron_rl.config import RunFolder

ARCHIVE = Path(__file__).parent / "data" / "recorded_run.tar.xz"
STEPS = 5
CPU_OF_THE_RECORD = "Intel(R) Xeon(R) Processor"
"""As /proc/cpuinfo names it. Another one may take sums in another order."""


def extract(folder: Path) -> RunFolder:
    """The run's folder, in `folder`; the test may change it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return RunFolder(folder / "recorded")
