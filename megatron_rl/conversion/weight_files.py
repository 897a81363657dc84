"""Which files of a model folder hold its weights, and what a folder is that has none to read."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.model_files import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHARD = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_PICKLES = ("pytorch_model*.bin", "pytorch_model*.pt", "consolidated*.pth", "model*.bin")
_PARTS_OF_DOWNLOADS = ("*.incomplete", "*.part", "*.aria2", "*.crdownload", ".cache/huggingface/download/*.incomplete")


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and the file of each tensor by the index.

    Without an index, one file is read, or all shards of one set, whose names tell how many there are.

    Args:
        folder: A model folder.

    Returns:
        The files, of which some may not be there; the index, empty without one.

    Raises:
        CheckpointError: There is no such file; the message says what is there instead, and what to do.
    """
    if (folder / INDEX_FILE).exists():
        index = _read_index(folder / INDEX_FILE)
        return [folder / name for name in sorted(set(index.values()))], index
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE], {}
    return _shards(folder) or _refuse(folder), {}


def _shards(folder: Path) -> list[Path]:
    """All shards of the one set that is there.

    Raises:
        CheckpointError: Some are missing, or there are several sets.
    """
    sets: dict[tuple[str, int], dict[int, Path]] = defaultdict(dict)
    for file in sorted(folder.glob("*.safetensors")):
        if named := _SHARD.fullmatch(file.name):
            sets[named[1], int(named[3])][int(named[2])] = file
    if len(sets) > 1:
        names = ", ".join(f"{name} of {count}" for name, count in sorted(sets))
        raise CheckpointError(
            f"{folder} has no {INDEX_FILE}, and shards of several checkpoints ({names}); fetch the index, or move all but one "
            "set away"
        )
    for (_, count), found in sets.items():
        if missing := sorted(set(range(1, count + 1)) - found.keys()):
            raise CheckpointError(
                f"{folder} has no {INDEX_FILE}, and of {count} shards number {', '.join(map(str, missing))} "
                f"{'is' if len(missing) == 1 else 'are'} missing: the download is not complete; fetch the folder again"
            )
        return [found[number] for number in sorted(found)]
    return []


def _refuse(folder: Path) -> list[Path]:
    """Raises CheckpointError, which says what the folder has in place of safetensors."""
    if parts := sorted(file.name for pattern in _PARTS_OF_DOWNLOADS for file in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has no weights yet: {parts[0]}{_and_more(parts)} belongs to a download that has not finished; wait for "
            "it, or fetch the folder again"
        )
    if pickles := sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has its weights as pickles of PyTorch ({pickles[0]}{_and_more(pickles)}), which run code when they are "
            'read, and no safetensors; write them once as such: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}', dtype='auto').save_pretrained('NEW')\", then copy the tokenizer's files there"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    what = f"it has {others[0]}{_and_more(others)}, whose name says nothing of shards" if others else "it has none at all"
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE} with its shards; {what}; fetch the weights again")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _read_index(file: Path) -> dict[str, str]:
    places: Any = read_json(file).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{file} has no weight_map with a file for each tensor; fetch it again")
    if outside := sorted({name for name in places.values() if Path(name).name != name}):
        raise CheckpointError(f"{file} names {outside[0]!r}, which is not a file of its folder; fetch it again")
    return places
