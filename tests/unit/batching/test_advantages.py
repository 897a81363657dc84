"""Group-relative advantages against hand-computed numbers, and where they have to be exactly zero."""

import numpy as np
import pytest

from megatron_rl.batching import group_mean, group_mean_std


def test_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 3.0])  # mean 1, deviations 0 -1 -1 2, variance 6/4
    np.testing.assert_allclose(group_mean(rewards), [0, -1, -1, 2], rtol=1e-15)
    np.testing.assert_allclose(group_mean_std(rewards), np.array([0, -1, -1, 2]) / np.sqrt(1.5), rtol=1e-15)


@pytest.mark.parametrize("advantages", [group_mean, group_mean_std])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [1 / 3] * 7, [-0.7], [0.0, 0.0], []])
def test_equal_rewards_give_exactly_zero(advantages, rewards):
    """np.mean of three times .1 is an ulp off .1: divided by a deviation of the same size that would be an advantage of 1."""
    assert advantages(np.array(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_std_removes_the_scale_of_the_rewards(scale):
    rewards = np.random.default_rng(3).normal(size=9)
    result = group_mean_std(rewards * scale)
    np.testing.assert_allclose(result, group_mean_std(rewards), rtol=1e-9)
    assert abs(result.mean()) < 1e-12 and abs(result.std() - 1) < 1e-12
