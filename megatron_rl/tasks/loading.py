"""Makes a Task from the task section of a configuration, and finds what is wrong before the run starts."""

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config.sections import Task as TaskSection
from megatron_rl.tasks.errors import TaskError
from megatron_rl.tasks.jsonl import JsonlSource
from megatron_rl.tasks.reasoning_gym import ReasoningGymSource
from megatron_rl.tasks.task import Source, Task


def load_task(section: TaskSection, seed: int) -> Task:
    """Loads a task and renders its first prompt.

    Args:
        section: The task section of the configuration.
        seed: Seed of the items and their order.

    Returns:
        The task.

    Raises:
        TaskError: The task is unknown, its arguments or file are wrong, a function cannot be imported, or a template names a
            field that the items lack.
    """
    source: Source
    if section.name is not None:
        source = ReasoningGymSource(section.name, section.arguments, section.size, seed)
        name = section.name
    else:
        assert section.file is not None  # a rule of the configuration
        name = section.file.name
        source = JsonlSource(section.file, seed, needs_answer=section.reward is None)
    reward = import_function(section.reward, "task.reward") if section.reward else None
    environment = import_function(section.environment, "task.environment") if section.environment else None
    task = Task(name, source, section.prompt_template, section.answer_template, reward, environment)
    task.prompt(0)  # a template that cannot be rendered fails here, not at the first group
    return task


def import_function(path: str, where: str) -> Callable:
    """Imports a user's function; modules in the current folder are found.

    Args:
        path: "module:function".
        where: Key of the configuration, for messages.

    Returns:
        The function.

    Raises:
        TaskError: The module cannot be imported or has no such function.
    """
    module_name, colon, function_name = path.partition(":")
    if not colon or not module_name or not function_name:
        raise TaskError(f"{where} = '{path}': write it as module:function, for example my_rewards:exact")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's file, which may raise anything
        last_lines = "".join(traceback.format_exception(error)[-2:]).strip()
        raise TaskError(f"{where} = '{path}': importing {module_name} failed (searched from {here} too): {last_lines}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))]
        near = difflib.get_close_matches(function_name, known, n=3, cutoff=0.0)
        raise TaskError(f"{where} = '{path}': {module_name} has no function {function_name}; it has {', '.join(near) or 'none'}")
    return function
