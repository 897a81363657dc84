"""The typed configuration of a run: one TOML file, no hidden defaults, unknown keys refused."""

from megatron_rl.config.folder import RunFolder, check_startable, run_folder
from megatron_rl.config.reader import ConfigError, load_config, parse_overrides, to_toml
from megatron_rl.config.tree import Config

__all__ = ["Config", "ConfigError", "RunFolder", "check_startable", "load_config", "parse_overrides", "run_folder", "to_toml"]
