"""`megatron-rl check`: the stages announced as they run, then the table."""

import json
import signal
import sys
from pathlib import Path

from rich.console import Console

from megatron_rl.config import Config
from megatron_rl.conversion.model_files import where_hf_config_is_from
from megatron_rl.errors import accessing, check_output_file
from megatron_rl.preflight.check import check
from megatron_rl.preflight.table import print_report


def check_and_print(config: Config, *, fault: str | None, with_server: bool, json_file: Path | None) -> bool:
    """Run all stages, and print how each ends and the table.

    Args:
        config: Of the run.
        fault: The fault to inject, of `preflight.faults.FAULTS`; None for none.
        with_server: Whether the stage with a vLLM server is run.
        json_file: Where the numbers are written as well, as JSON; None: nowhere.

    Returns:
        Whether all stages passed.

    Raises:
        FileAccessError: `json_file` cannot be written.
    """
    if json_file is not None:
        check_output_file("--json", json_file)
    # So that processes and files are cleaned up on this way out, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    if source := where_hf_config_is_from(config):
        console.print(source, highlight=False, markup=False)
    with console.status("starting") as status:  # shows nothing where the output is no terminal
        report = check(config, fault=fault, with_server=with_server, announce=status.update)
    print_report(report, console)
    if json_file is not None:
        with accessing(json_file, "choose another file for --json"):
            json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return not report.failed
