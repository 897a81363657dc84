"""Quantiles by a histogram compared with those of all values; tests/distributed shows that ranks reduce it."""

import numpy as np
import pytest
import torch

from megatron_rl.objective import NUM_BINS, ratio_counts, ratio_quantiles

QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0])
def test_they_are_those_of_all_values(scale):
    d = torch.randn(20_001, generator=torch.Generator().manual_seed(1)) * scale + 0.3 * scale
    found = ratio_quantiles(ratio_counts(d))
    for name, share in QUANTILES.items():
        # A bin is .45 % of |d| wide where this is above 1e-6, and 4.5e-9 around 0.
        wanted = float(np.quantile(d.double().numpy(), share, method="inverted_cdf"))
        assert np.log(found[name]) == pytest.approx(wanted, rel=3e-3, abs=3e-9)


def test_parts_of_a_batch_add_up_in_any_order():
    d = torch.randn(999, generator=torch.Generator().manual_seed(2))
    parts = [ratio_counts(part) for part in d.split([1, 700, 298])]
    assert torch.equal(ratio_counts(d), parts[2] + parts[0] + parts[1])
    assert torch.equal(ratio_counts(d.flip(0)), ratio_counts(d))


def test_singletons_have_ratio_1_exactly():
    d = torch.cat([torch.zeros(60), torch.full((40,), -0.5)])
    assert ratio_quantiles(ratio_counts(d))["ratio_p50"] == 1.0


def test_no_tokens_have_no_quantiles_and_extremes_stay_finite():
    assert ratio_quantiles(ratio_counts(torch.zeros(0))) == {}
    counts = ratio_counts(torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30]))
    assert counts.shape == (NUM_BINS,) and counts[-1] == 3 and counts[0] == 1
    assert all(np.isfinite(value) for value in ratio_quantiles(counts).values())
