"""The typed error of the records."""

from megatron_rl.errors import RunError


class ContractError(RunError, ValueError):
    """A record that breaks its contract: refused where it is read, never patched.

    Attributes:
        rollout: uid of the record.
        token: Index of the offending position; None where the complete record is meant.
        value: What was found.
        rule: The contract that it breaks.
    """

    def __init__(self, *, rollout: str, token: int | None, value: object, rule: str) -> None:
        self.rollout, self.token, self.value, self.rule = rollout, token, value, rule
        where = f"rollout {rollout}" if token is None else f"rollout {rollout}, token {token}"
        super().__init__(f"{where}: found {value}; rule: {rule}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.rollout, self.token, self.value, self.rule)


def _rebuild(rollout: str, token: int | None, value: object, rule: str) -> ContractError:
    return ContractError(rollout=rollout, token=token, value=value, rule=rule)
