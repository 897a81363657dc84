"""The example of docs/keep-set.md, run as it stands there."""

import re
from pathlib import Path

import torch


def test_the_example_of_the_documentation_runs() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/keep-set.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(example, names)
    out, weight, hidden = names["out"], names["weight"], names["hidden"]
    assert out.log_probs.shape == (3,)
    assert out.log_probs[1] == 0  # not scored
    full = torch.log_softmax(hidden @ weight.T / 0.8, dim=-1)
    pair = torch.log_softmax((hidden[0] @ weight[[5, 7]].T) / 0.8, dim=-1)
    torch.testing.assert_close(out.log_probs[[0, 2]], torch.stack([pair[1], full[2, 9]]))
    assert weight.main_grad.any()
