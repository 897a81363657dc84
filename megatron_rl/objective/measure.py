"""Metrics of a loss as one tensor, so that a microbatch does not wait for the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.metrics import Metric, Reduction


class Measured:
    """Metrics being measured: names and reductions on the host, (total, count) pairs on the device until `metrics` is called."""

    def __init__(self) -> None:
        self._kinds: list[tuple[str, Reduction]] = []
        self._pairs: list[Tensor] = []  # f64 [names, 2] each: totals in double, so that splits of a batch can be compared

    def mean(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Measure a mean over tokens.

        Args:
            name: Of the metric.
            values: [M], all finite, also those that do not count.
            where: bool [M], the tokens that count; None: all.
        """
        where = torch.ones_like(values, dtype=torch.bool) if where is None else where
        self.means({name: values}, {"": where})

    def means(self, values: Mapping[str, Tensor], groups: Mapping[str, Tensor]) -> None:
        """Measure the mean of each value [M] over each group of tokens (bool [M]), under the name value + group."""
        stacked = torch.stack([v.detach().double() for v in values.values()])  # [values, M]
        members = torch.stack(list(groups.values())).double()  # [groups, M]
        totals = stacked @ members.T
        counts = members.sum(1).expand_as(totals)
        self._add([(value + group, "mean") for value in values for group in groups], totals, counts)

    def extreme(self, name: str, values: Tensor, reduction: Reduction) -> None:
        """Measure the 'max' or 'min' (`reduction`) of values [M]; nothing is measured where M is 0."""
        if values.numel():
            extreme = values.detach().amax() if reduction == "max" else values.detach().amin()
            self._add([(name, reduction)], extreme.double(), torch.full_like(extreme, values.numel(), dtype=torch.float64))

    def sum(self, name: str, value: Tensor) -> None:
        """Measure a scalar that adds up over microbatches and ranks."""
        self._add([(name, "sum")], value.detach().double(), torch.ones_like(value, dtype=torch.float64))

    def metrics(self) -> dict[str, Metric]:
        """All that was measured, by name. The only function that waits for the device: call it once a step."""
        pairs = torch.cat(self._pairs).tolist() if self._pairs else []
        return {name: Metric(kind, total, count) for (name, kind), (total, count) in zip(self._kinds, pairs, strict=True)}

    def _add(self, kinds: list[tuple[str, Reduction]], totals: Tensor, counts: Tensor) -> None:
        self._kinds += kinds
        self._pairs.append(torch.stack([totals.reshape(-1), counts.reshape(-1)], dim=1))
