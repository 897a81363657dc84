"""Prints what the architecture tests measured below pytest's results, also when all of them pass."""

import pytest

REPORT = pytest.StashKey[list[tuple[str, list[str]]]]()
"""Titles with their lines, as tests append them."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a pytest-xdist worker: send what it measured to the controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["report"] = session.config.stash[REPORT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """A pytest-xdist worker has exited, or crashed without output."""
    node.config.stash[REPORT] += getattr(node, "workeroutput", {}).get("report", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash[REPORT]:
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.line(line)
