"""Writes runs to one HTML file: plots over steps, rollouts token by token. The file opens from disk, without a network."""

from megatron_rl.report.page import ReportError, Written, write_report

__all__ = ["ReportError", "Written", "write_report"]
