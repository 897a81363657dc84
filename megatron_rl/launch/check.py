"""`megatron-rl check`: the stages announced as they run, then the table."""

import json
import signal
import sys
from pathlib import Path

from rich.console import Console

from megatron_rl.config import Config
from megatron_rl.errors import accessing
from megatron_rl.preflight.check import check
from megatron_rl.preflight.table import print_report


def check_and_print(config: Config, *, fault: str | None, with_server: bool, json_file: Path | None) -> bool:
    """Whether all stages passed. json_file: where the numbers go as well."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that processes and files are cleaned up on this way out, too
    console = Console()
    with console.status("starting") as status:  # nothing where nobody looks
        report = check(config, fault=fault, with_server=with_server, announce=status.update)
    print_report(report, console)
    if json_file is not None:
        with accessing(json_file, "choose another file for --json"):
            json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return not report.failed
