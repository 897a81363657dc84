"""Child processes and ports: started, watched and stopped so that none is left behind."""

from megatron_rl.processes.child import (
    Child,
    Command,
    Process,
    ProcessError,
    dying_with_me,
    end_forks_with_me,
    log_tail,
    stop_all,
)
from megatron_rl.processes.ports import PortError, check_port, free_ports

__all__ = [
    "Child", "Command", "PortError", "Process", "ProcessError", "check_port", "dying_with_me", "end_forks_with_me", "free_ports",
    "log_tail", "stop_all",
]  # fmt: skip
