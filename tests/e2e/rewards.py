"""A reward under which every policy has something to learn, so that no test trains on gradients of zero."""


def variety(prompt: str, completion: str, item: dict) -> float:
    """Different characters in the completion."""
    return float(len(set(completion)))
