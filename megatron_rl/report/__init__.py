"""Runs as one HTML file: plots over steps, rollouts token by token; opens from disk, without a network."""

from megatron_rl.report.page import ReportError, Written, write_report

__all__ = ["ReportError", "Written", "write_report"]
