"""`megatron-rl doctor`: what is on this machine, and what a run would use of it. Works without torch and without a GPU."""

from megatron_rl.launch.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
