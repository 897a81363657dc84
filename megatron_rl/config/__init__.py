"""The typed configuration of a run: one TOML file, no hidden defaults, unknown keys refused."""

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.folder import RunFolder, check_own_config, check_startable, run_folder
from megatron_rl.config.reader import check_tree, load_config, parse_overrides, read_tree, to_toml
from megatron_rl.config.resume import changes_on_resume
from megatron_rl.config.sections import RoleNodes
from megatron_rl.config.tree import Config, layout_values

__all__ = [
    "Config",
    "ConfigError",
    "RoleNodes",
    "RunFolder",
    "changes_on_resume",
    "check_own_config",
    "check_startable",
    "check_tree",
    "layout_values",
    "load_config",
    "parse_overrides",
    "read_tree",
    "run_folder",
    "to_toml",
]
