"""How a run samples, as plain values: configured here, recorded with every rollout."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Temperature divides the logits; then the top_k largest are kept; then the smallest set whose probabilities sum up to top_p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_new_tokens: int = 64

    @property
    def truncates(self) -> bool:
        """Whether a sampled token comes with a keep-set."""
        return self.top_p < 1.0 or self.top_k > 0
