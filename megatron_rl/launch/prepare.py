"""Check the model of a run and place it in the run's folder before anything starts; its own process, since it needs torch.

python -m megatron_rl.launch.prepare CONFIG_TOML RUN_FOLDER      writes RUN_FOLDER/model and prints what the model is, as JSON
python -m megatron_rl.launch.prepare CONFIG_TOML                 only checks and prints
python -m megatron_rl.launch.prepare CONFIG_TOML --dry-run       the same, without the model's folder where it does not exist
"""

import json
import sys
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, RunFolder, load_config
from megatron_rl.conversion.model_files import where_hf_config_is_from
from megatron_rl.conversion.run_model import checked_hf_config, describe_model, write_run_model
from megatron_rl.conversion.run_text import describe_text
from megatron_rl.engine.deterministic_attention import check_deterministic_attention, has_flash_attention
from megatron_rl.errors import UserError
from megatron_rl.launch.error_report import USER_ERROR, disk_fault
from megatron_rl.processes.gpus import GpuQueryError, query_gpus
from megatron_rl.weight_mapping import ParameterTable

DRY_RUN = "--dry-run"


def prepare(config: Config, run: RunFolder | None, *, is_dry: bool = False) -> dict[str, object]:
    """Check the model against configuration and layout, then write it into the run's folder.

    Args:
        config: Of the run.
        run: Its folder; None: only check.
        is_dry: The published config.json is enough where the model's folder does not exist.

    Returns:
        What the model is and how the layout divides it, as plain values for a person.

    Raises:
        UserError: Model, layout and configuration do not fit one another.
    """
    hf_config = checked_hf_config(config, is_dry=is_dry)
    described = describe_model(hf_config, config)
    _check_attention_of_these_gpus(config, hf_config)
    if run is not None:
        write_run_model(run, config, hf_config)
    if is_dry and (source := where_hf_config_is_from(config)):
        return {**described, "config_json": source}
    folder = run.model if run is not None else config.model.path
    return described if folder is None else {**described, **describe_text(folder, config)}


def _check_attention_of_these_gpus(config: Config, hf_config: dict[str, Any]) -> None:
    """As each rank does when it starts, but before the run has a folder. A machine without GPUs, a login node, cannot tell."""
    if config.device == "cpu":
        return
    try:
        capabilities = {gpu.compute_capability for gpu in query_gpus()}
    except GpuQueryError:
        return
    for capability in sorted(capabilities):
        check_deterministic_attention(
            config, ParameterTable(hf_config).architecture, capability, has_flash_attention=has_flash_attention()
        )


def main(arguments: list[str]) -> int:
    """The program; see the top of this file. Exit status USER_ERROR: the message on stderr is for the user."""
    try:
        folders = [RunFolder(Path(word)) for word in arguments[1:] if word != DRY_RUN]
        described = prepare(load_config(Path(arguments[0])), folders[0] if folders else None, is_dry=DRY_RUN in arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        if (message := disk_fault(error)) is None:
            raise
        print(message, file=sys.stderr)
        return USER_ERROR
    print(json.dumps(described))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
