"""A step's record of random numbers, without a spool."""

from types import SimpleNamespace

import numpy as np

from megatron_rl.attribution.record import StepRecord


def record(
    num_tokens: int = 40, *, step: int = 3, temperature: float = 1.0, set_size: int = 4, stale: bool = False
) -> StepRecord:
    """Four rollouts, whose tokens are the last of their sequences every tenth."""
    numbers = np.arange(num_tokens)
    return StepRecord(
        plan=SimpleNamespace(step=step, entries=[SimpleNamespace(uid=f"g0.{n}") for n in range(4)]),
        entry=numbers * 4 // num_tokens,
        place=numbers % 10,
        position=numbers % 10 + 5,
        token=numbers,
        logprobs=-np.random.default_rng(0).random(num_tokens),
        version=step - (numbers % 3) * stale,
        set_size=np.full(num_tokens, set_size),
        is_last=numbers % 10 == 9,
        temperature=np.full(4, temperature),
    )
