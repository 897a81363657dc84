"""Metrics of a loss as one tensor, so that a microbatch costs no wait for the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.metrics import Metric, Reduction


class Measured:
    """Names with their reductions on the host; (total, count) pairs on the device until `metrics` is called, once a step."""

    def __init__(self) -> None:
        self._kinds: list[tuple[str, Reduction]] = []
        self._pairs: list[Tensor] = []  # f64 [names, 2] each: totals in double, so that splits of a batch can be compared

    def mean(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """values: [M]; where: bool [M], the tokens that count, None: all. The other tokens' values must be finite too."""
        where = torch.ones_like(values, dtype=torch.bool) if where is None else where
        self.means({name: values}, {"": where})

    def means(self, values: Mapping[str, Tensor], groups: Mapping[str, Tensor]) -> None:
        """The mean of each value [M] over each group of tokens (bool [M]), under the name value + group."""
        stacked = torch.stack([v.detach().double() for v in values.values()])  # [values, M]
        members = torch.stack(list(groups.values())).double()  # [groups, M]
        totals = stacked @ members.T
        counts = members.sum(1).expand_as(totals)
        self._add([(value + group, "mean") for value in values for group in groups], totals, counts)

    def extreme(self, name: str, values: Tensor, reduction: Reduction) -> None:
        """reduction: 'max' or 'min' of values [M]; nothing measured where M is 0."""
        if values.numel():
            extreme = values.detach().amax() if reduction == "max" else values.detach().amin()
            self._add([(name, reduction)], extreme.double(), torch.full_like(extreme, values.numel(), dtype=torch.float64))

    def sum(self, name: str, value: Tensor) -> None:
        """value: a scalar that adds up over microbatches and ranks."""
        self._add([(name, "sum")], value.detach().double(), torch.ones_like(value, dtype=torch.float64))

    def metrics(self) -> dict[str, Metric]:
        """The only wait for the device."""
        pairs = torch.cat(self._pairs).tolist() if self._pairs else []
        return {name: Metric(kind, total, count) for (name, kind), (total, count) in zip(self._kinds, pairs, strict=True)}

    def _add(self, kinds: list[tuple[str, Reduction]], totals: Tensor, counts: Tensor) -> None:
        self._kinds += kinds
        self._pairs.append(torch.stack([totals.reshape(-1), counts.reshape(-1)], dim=1))
