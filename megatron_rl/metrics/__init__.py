"""Named values with their reduction, and where they go: console, JSONL, TensorBoard, W&B, the summary of a run."""

from megatron_rl.metrics.metric import Metric, Metrics, Reduction, from_floats, merge, to_floats

__all__ = ["Metric", "Metrics", "Reduction", "from_floats", "merge", "to_floats"]
