"""Prompts, reference solutions and rewards: each a pure function of (seed, index), so that a run's position is one integer."""

from megatron_rl.tasks.errors import RewardError, TaskError
from megatron_rl.tasks.loading import load_task
from megatron_rl.tasks.task import Item, Task
from megatron_rl.tasks.text import TextEncoder

__all__ = ["Item", "RewardError", "Task", "TaskError", "TextEncoder", "load_task"]
