"""The trainer's side of a weight update: rank 0 streams new weights to every rollout server, as one transaction.

    pause all -> start -> stream -> finish(version) -> confirm each -> reset the prefix cache -> resume

What is sent (`WeightSource`), how it is sent (`WeightSender`) and the calls to a server (`ServerControl`) are contracts of
`inference.sender`, kept by the run's inference engine; the order of the calls is defined here.
"""

from megatron_rl.weight_sync.transaction import UpdateReport, update_servers

__all__ = ["UpdateReport", "update_servers"]
