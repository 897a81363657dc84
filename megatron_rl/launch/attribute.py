"""`megatron-rl attribute`: a recorded step's mismatch, factor by factor, and the fault that causes it."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.attribution.request import make_request
from megatron_rl.attribution.run import run_attribution
from megatron_rl.attribution.table import print_attribution
from megatron_rl.config import RunFolder
from megatron_rl.errors import accessing, check_output_file
from megatron_rl.launch.local import checked_model
from megatron_rl.metrics import wide_console


def attribute_and_print(
    run: RunFolder, overrides: Sequence[str], step: int, *, retrain: int, fault: str | None, json_file: Path | None
) -> bool:
    """Attributes a step and prints the tables.

    Args:
        run: The folder of the run; it gets a new folder under attributions/, and is otherwise only read.
        overrides: Words of the command line that change the run's configuration.
        step: The step to attribute.
        retrain: The largest number of steps to train again.
        fault: The fault to inject, of `preflight.faults.FAULTS`; None for none.
        json_file: Where the numbers are written as well, as JSON; None: nowhere.

    Returns:
        Whether no fault was found and only rounding is left.

    Raises:
        ConfigError: The step cannot be attributed; the message lists the steps that can.
        FileAccessError: `json_file` cannot be written.
        ProcessError: A rank failed.
    """
    if json_file is not None:
        check_output_file("--json", json_file)
    console = wide_console()
    request = make_request(run, overrides, step, retrain, fault)
    if overrides:
        checked_model(request.config)  # a layout that does not fit the model is refused here, with a message for the user
    with console.status("starting") as status:
        found = run_attribution(request, status.update)
    print_attribution(found, console)
    if json_file is not None:
        with accessing(json_file, "choose another file for --json"):
            json_file.write_text(json.dumps(found.as_json(), indent=2) + "\n")
    return found.is_clean
