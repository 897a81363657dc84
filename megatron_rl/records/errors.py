"""The typed error of the records."""


class ContractError(ValueError):
    """A record that breaks its contract: refused where it is read, never patched.

    rollout: uid of the record; token: index of the offending position (None where the whole record is meant);
    value: what was found; rule: the contract that it breaks.
    """

    def __init__(self, *, rollout: str, token: int | None, value: object, rule: str):
        self.rollout, self.token, self.value, self.rule = rollout, token, value, rule
        where = f"rollout {rollout}" if token is None else f"rollout {rollout}, token {token}"
        super().__init__(f"{where}: found {value}; rule: {rule}")

    def __reduce__(self):
        return _rebuild, (self.rollout, self.token, self.value, self.rule)


def _rebuild(rollout: str, token: int | None, value: object, rule: str) -> ContractError:
    return ContractError(rollout=rollout, token=token, value=value, rule=rule)
