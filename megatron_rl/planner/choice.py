"""Writes a plan into a run's TOML file.

Values are replaced line by line, so that comments and everything else stay as they are.
"""

import json
import re
from pathlib import Path

from megatron_rl.config import Config, ConfigError, load_config
from megatron_rl.planner.balance import ParallelismPlan

_SECTION = re.compile(r"^\[([A-Za-z_.]+)\]\s*(#.*)?$")

_EXPERT_PARALLEL = "--enable-expert-parallel"
"""vLLM's argument that spreads the experts over a server's ranks."""


def values_of(plan: ParallelismPlan, config: Config) -> dict[str, dict[str, object]]:
    """The configuration values that a plan sets.

    Args:
        plan: The plan.
        config: The file's present configuration, whose other server arguments are kept.

    Returns:
        Values by section and key. None removes a key, where the default is what the plan says.
    """
    others = [argument for argument in config.servers.extra_arguments if argument != _EXPERT_PARALLEL]
    arguments = [*others, _EXPERT_PARALLEL] if plan.server.expert > 1 else others
    c, layout = plan.trainer.candidate, plan.trainer.candidate.layout
    values: dict[str, dict[str, object]] = {
        "servers": {
            "count": plan.servers,
            "tensor": plan.server.tensor,
            "nodes": plan.server_nodes if plan.server_nodes > 1 else None,
            "max_num_seqs": plan.server.sequences,
            "extra_arguments": arguments or None,
        },
        "layout": {
            "world_size": layout.world_size,
            "tensor": layout.tp,
            "pipeline": layout.pp,
            "virtual_pipeline": layout.vpp if layout.vpp > 1 else None,
            "first_stage_layers": layout.first_stage_layers,
            "last_stage_layers": layout.last_stage_layers,
            "context": layout.cp if layout.cp > 1 else None,
            "expert": layout.ep,
            "expert_tensor": layout.etp if layout.etp > 1 else None,
        },
        "trainer": {"max_tokens_per_microbatch": c.microbatch_tokens, "recompute": c.recompute},
    }
    if "slurm" in config.model_fields_set:
        values |= {f"slurm.{role}": {"nodes": nodes} for role, nodes in _nodes(plan, config).items() if nodes}
    return values


def _nodes(plan: ParallelismPlan, config: Config) -> dict[str, int]:
    """The fewest nodes of each role: with as many ranks on each, with whole servers. 0 for nodes without GPUs."""
    ranks, width, roles = plan.trainer.candidate.layout.world_size, plan.server.tensor, config.slurm
    trainer, rollouts = roles.trainer.gpus_per_node, roles.rollouts.gpus_per_node
    if not trainer or not rollouts:
        return {"trainer": 0, "rollouts": 0}
    of_trainer = next(nodes for nodes in range(-(-ranks // trainer), ranks + 1) if ranks % nodes == 0)
    together = rollouts // width
    return {"trainer": of_trainer, "rollouts": -(-plan.servers // together) if together else plan.servers * -(-width // rollouts)}


def write_choice(file: Path, plan: ParallelismPlan, *, longest_sequence: int | None = None) -> Config:
    """Changes the file in place. The new text is parsed and validated before it replaces the old file.

    Args:
        file: A run's TOML file. Of a symbolic link, the file that it names is changed, and the link stays.
        plan: The plan whose values are written.
        longest_sequence: Tokens that the plan was made for, if they differ from the file's. What is more is the longest
            response's, as `workload_of` has it.

    Returns:
        The configuration as it was read from the new text.

    Raises:
        ConfigError: The changed text is no valid configuration; the file is unchanged.
    """
    file = file.resolve()
    text, config = file.read_text(), load_config(file)
    values_by_section = values_of(plan, config)
    if longest_sequence is not None and (longer := longest_sequence - config.model.max_sequence_length):
        values_by_section |= {
            "model": {"max_sequence_length": longest_sequence},
            "rollouts": {"max_new_tokens": config.rollouts.max_new_tokens + max(0, longer)},
        }
    for section, values in values_by_section.items():
        for key, value in values.items():
            text = with_value(text, section, key, value)
    written = file.with_name(f".{file.name}.plan")
    try:
        written.write_text(text)
        config = _read_again(written, file)
        written.replace(file)
    finally:
        written.unlink(missing_ok=True)
    return config


def _read_again(written: Path, file: Path) -> Config:
    try:
        return load_config(written)
    except ConfigError as error:
        raise ConfigError(
            f"{file} is unchanged, because the plan's values could not be written into it line by line: {error}"
        ) from error


def with_value(text: str, section: str, key: str, value: object) -> str:
    """Sets one key of a TOML text; all other lines stay as they are.

    Args:
        text: The TOML text.
        section: Name of the table, which is added at the end if the text lacks it.
        key: Key in the table. Its present line is replaced and keeps its comment; a new key is added after the table's last one.
        value: A number, string or list of strings; None removes the key.

    Returns:
        The changed text.
    """
    lines, inside, last, found = text.splitlines(), False, None, None
    for number, line in enumerate(lines):
        if header := _SECTION.match(line.strip()):
            inside = header.group(1) == section
            last = number if inside else last
        elif inside and line.strip() and not line.lstrip().startswith("#"):
            last = number
            found = number if re.match(rf"\s*{re.escape(key)}\s*=", line) else found
    if value is None:
        return "\n".join(lines[:found] + lines[found + 1 :] if found is not None else lines) + "\n"
    entry = f"{key} = {json.dumps(value)}"  # numbers, strings and lists of strings look the same in JSON and TOML
    if found is not None:
        _, mark, comment = lines[found].partition("#")
        lines[found] = f"{entry}  {mark}{comment}" if mark else entry
    elif last is not None:
        lines.insert(last + 1, entry)
    else:
        lines += ["", f"[{section}]", entry]
    return "\n".join(lines) + "\n"
