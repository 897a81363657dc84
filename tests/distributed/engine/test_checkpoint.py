"""A resumed run is the uninterrupted one: to the bit at its layout, within rounding at another."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import LEARNING_RATE, Setting
from tests.distributed.engine.checkpoint_cases import broken_loads, refusals, resume, save_and_continue

SAVED_AT = {
    "tp2 pp2 ep2": Setting(layout=Layout(4, tp=2, pp=2, ep=2)),
    "tied, pp2 vpp2 ep2": Setting("qwen3_moe_tied", Layout(4, pp=2, vpp=2, ep=2)),
    "bf16, tp2 ep2": Setting(layout=Layout(4, tp=2, ep=2), dtype="bfloat16"),
}
RESUMED_AT = [Layout(4), Layout(4, tp=4, etp=2, ep=2), Layout(4, pp=4), Layout(4, pp=2, vpp=2, ep=2), Layout(4, ep=4)]


@pytest.mark.parametrize("name", SAVED_AT)
def test_the_same_layout_resumes_to_the_bit(four: RankPool, tmp_path: Path, name: str) -> None:
    wanted = four.run(save_and_continue, SAVED_AT[name], tmp_path / "step2")[0]
    step, found = four.run(resume, SAVED_AT[name], tmp_path / "step2")[0]
    assert step == 2
    assert all(torch.equal(found[key], weight) for key, weight in wanted.items())


def test_another_layout_resumes_within_rounding(four: RankPool, one: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "step2"
    wanted = four.run(save_and_continue, SAVED_AT["tp2 pp2 ep2"], folder)[0]
    others = [four.run(resume, Setting(layout=layout), folder)[0] for layout in RESUMED_AT]
    for _, found in [*others, one.run(resume, Setting(), folder)[0]]:
        # Lost moments or a wrong step count move weights by the full learning rate.
        assert max(float((found[key] - weight).abs().max()) for key, weight in wanted.items()) < 0.2 * LEARNING_RATE


class Command:
    """An object whose unpickling runs something: how a checkpoint from elsewhere would."""

    def __init__(self, touched: Path) -> None:
        self._touched = touched

    def __reduce__(self) -> tuple:
        return Path.touch, (self._touched,)


def test_a_folder_from_elsewhere_runs_nothing_and_a_broken_one_is_named(one: RankPool, tmp_path: Path) -> None:
    intact, touched = tmp_path / "step2", tmp_path / "touched"
    one.run(save_and_continue, Setting(), intact)
    folders = {name: tmp_path / name for name in ("metadata", "common", "half", "gone")}
    for folder in folders.values():
        shutil.copytree(intact, folder)
    (folders["metadata"] / ".metadata").write_bytes(pickle.dumps(Command(touched)))
    torch.save({"step": 2, "more": Command(touched)}, folders["common"] / "common.pt")  # 0.19 reads it where it is there
    tensors = next(folders["half"].glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2])
    next(folders["gone"].glob("*.distcp")).unlink()
    found = dict(zip(folders, one.run(broken_loads, Setting(), list(folders.values()))[0], strict=True))
    assert not touched.exists()
    for name, message in found.items():
        assert message.startswith(f"{folders[name]} cannot be read: "), message
        assert message.endswith("of a foreign one use only the weights, by megatron-rl convert megatron-to-hf")
    assert ".metadata asks for pathlib." in found["metadata"]
    assert "an object next to the tensors is more than data, and is not made" in found["common"]


def test_what_is_refused(four: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "step2"
    four.run(save_and_continue, SAVED_AT["tp2 pp2 ep2"], folder)
    half = tmp_path / "half"
    half.mkdir()
    (half / ".metadata").write_bytes((folder / ".metadata").read_bytes())
    for found in four.run(refusals, SAVED_AT["tp2 pp2 ep2"], folder, Setting("qwen3_moe_tied", Layout(4, tp=2, pp=2, ep=2))):
        assert "never overwritten" in found[0]
        assert "not a complete checkpoint" in found[1]
        assert "of another model: " in found[2] and "vocab_size is 103 there and 101 in this run" in found[2]
        assert "Not a directory" in found[3]
    assert not list(tmp_path.glob(".*part*"))
