"""What a run prints and records while it is running, and its summary at the end."""

from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console

from megatron_rl.config import Config, RunFolder
from megatron_rl.metrics import Sinks, print_summary, write_summary
from megatron_rl.wire.control import Progress

STEPS_OF_EQUAL_REWARDS = 5
"""Steps in a row without two different rewards in any group before an event reports it: such steps change nothing."""


class RunObserver:
    """The orchestrator's Observer: writes to the sinks of the configuration, and events also to logs/events.log.

    Args:
        config: Of the run.
        folder: Of the run.
        console: Where it is printed; None: the terminal.
    """

    def __init__(self, config: Config, folder: RunFolder, console: Console | None = None) -> None:
        self._folder, self._console = folder, console
        self._events = open(folder.logs / "events.log", "a")  # noqa: SIM115 - open until __exit__
        self._sinks = Sinks(config, folder, console, on_fault=self.event)
        self._summary: Mapping[str, float] = {}
        self._examples: Sequence[dict] = ()
        self._steps_of_equal_rewards = 0

    def batch(self, summary: Mapping[str, float], examples: Sequence[dict]) -> None:
        """Keep the batch's summary and examples until its step is trained; report rewards that have been equal for long."""
        self._summary, self._examples = summary, examples
        self._steps_of_equal_rewards = self._steps_of_equal_rewards + 1 if summary.get("equal_reward_share") == 1.0 else 0
        if self._steps_of_equal_rewards == STEPS_OF_EQUAL_REWARDS:
            self.event(
                f"no learning signal: for {STEPS_OF_EQUAL_REWARDS} steps the rewards within each group were equal (mean "
                f"{summary['reward_mean']:g}), so every advantage was 0; look at the rollouts in {self._folder.examples}, and "
                "check that the reward distinguishes better answers from worse ones"
            )

    def step(self, step: int, metrics: Mapping[str, float], *, rollout_tokens_per_s: float, ledger: Mapping[str, float]) -> None:
        """Write the metrics and the example rollouts of a step."""
        in_ledger = {f"ledger/{name}": value for name, value in ledger.items()}
        # The names of metrics and summary are distinct, except in a plan recorded by an earlier version.
        of_batch = {name: value for name, value in self._summary.items() if name not in metrics}
        self._sinks.write(step, {**metrics, **of_batch, **in_ledger, "rollout_tokens_per_s": rollout_tokens_per_s})
        self._sinks.examples(step, self._examples)

    def progress(self, report: Progress) -> None:
        """Show the progress of the supervised start, and write its metrics."""
        self._sinks.progress(report.phase, report.done, report.total, report.metrics)
        if report.metrics:
            self._sinks.write(report.done, report.metrics, "supervised")

    def event(self, message: str) -> None:
        """Show the event, and append it to logs/events.log."""
        self._events.write(message + "\n")
        self._events.flush()
        self._sinks.say(message)

    def summarise(self, last_words: str) -> None:
        """Close the sinks, write summary.json, print its table unless no step is done, then print what the user may do next."""
        self._sinks.close()
        summary = write_summary(self._folder.metrics_file, self._folder.summary_file, self._sinks.lost)
        if summary["steps"]:
            print_summary(summary, self._console)
        (self._console or Console()).print(last_words, soft_wrap=True, highlight=False, markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sinks.close()
        self._events.close()
