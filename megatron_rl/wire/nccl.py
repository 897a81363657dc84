"""What processes that share an NCCL communicator must agree on: the trainer's ranks, and rank 0 with the servers' workers."""

DETERMINISTIC_NCCL = {"NCCL_ALGO": "Ring"}
"""Variables of a deterministic run. NCCL does not compare them: members of a communicator that differ in one hang."""
