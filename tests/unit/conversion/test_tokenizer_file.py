"""tokenizer.json made from tiktoken's and SentencePiece's files, against these libraries.

The vocabularies are learned here from a few texts; the pattern and the class are laid out as Kimi-K2's file has them, whose own
vocabulary is not tried here.
"""

import base64
import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from megatron_rl.conversion import CheckpointError, make_random_model
from megatron_rl.conversion.tokenizer_file import make_tokenizer, proof_texts
from megatron_rl.launch.cli import app
from megatron_rl.launch.prepare import prepare
from tests.unit.launch.test_prepare import MODEL, config

tiktoken = pytest.importorskip("tiktoken")
sentencepiece = pytest.importorskip("sentencepiece")

PARTS = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
LITERALS = ", ".join(f'r"""{part}"""' for part in PARTS)
CLASS = f"""
import os  # what follows is read, not run
raise SystemExit("run")
class TikTokenTokenizer:
    num_reserved_special_tokens = 8
    pat_str = "|".join([{LITERALS}])
"""
NAMED = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<think>": 5}


def learned_ranks(num_merges: int = 300) -> dict[bytes, int]:
    """Byte-pair encoding of the texts, learned the slow way: each merge joins the most frequent pair."""
    words = Counter(word for text in proof_texts([]) for word in text.split(" "))
    pieces = {word: [bytes([b]) for b in (" " + word).encode()] for word in words}
    ranks = {bytes([b]): b for b in range(256)}
    for _ in range(num_merges):
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(pieces[word], pieces[word][1:], strict=False):
                pairs[pair] += count
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = len(ranks)
        for word, parts in pieces.items():
            joined, at = [], 0
            while at < len(parts):
                both = parts[at : at + 2] == [left, right]
                joined.append(left + right if both else parts[at])
                at += 2 if both else 1
            pieces[word] = joined
    return ranks


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return learned_ranks()


def tiktoken_folder(folder: Path, ranks: dict[bytes, int]) -> Path:
    """As Kimi-K2 is published: tiktoken.model, tokenization_kimi.py, tokenizer_config.json."""
    make_random_model(folder, {**MODEL, "vocab_size": len(ranks) + 8}, seed=0)
    (folder / "tokenizer.json").unlink()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenization_kimi.py").write_text(CLASS)
    added = {str(len(ranks) + i): {"content": name, "special": True} for name, i in NAMED.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder


def test_tiktoken(ranks: dict[bytes, int], tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path / "kimi", ranks)
    with pytest.raises(Exception, match="there is tiktoken.model; `megatron-rl tokenizer .*kimi` makes tokenizer.json from it"):
        prepare(config(folder), None)
    result = CliRunner().invoke(app, ["tokenizer", str(folder)])
    assert result.exit_code == 0 and "the same ids and text as tiktoken" in result.output and "8 special tokens" in result.output
    special = {name: len(ranks) + i for name, i in NAMED.items()}
    special |= {f"<|reserved_token_{len(ranks) + i}|>": len(ranks) + i for i in (3, 4, 6, 7)}
    original = tiktoken.Encoding("own", pat_str="|".join(PARTS), mergeable_ranks=ranks, special_tokens=special)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lengths = 0
    for text in [*proof_texts(list(special)), "<think>Kimi's 中文 tokens</think>", "x" * 3000]:
        ids = made.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text, allowed_special="all")
        lengths += len(text.encode()) - len(ids)
    assert lengths > 3000 and made.get_vocab_size() == len(ranks) + 8
    prepare(config(folder), None)
    assert "has tokenizer.json already" in CliRunner().invoke(app, ["tokenizer", str(folder)]).output


def test_another_pattern_gives_other_ids_and_is_not_written(ranks: dict[bytes, int], tmp_path: Path, monkeypatch) -> None:
    folder = tiktoken_folder(tmp_path / "kimi", ranks)
    from transformers.convert_slow_tokenizer import TikTokenConverter

    own = TikTokenConverter.converted

    def with_another_pattern(self):
        self.pattern = r"\p{N}|[^\p{N}]+"
        return own(self)

    monkeypatch.setattr(TikTokenConverter, "converted", with_another_pattern)
    with pytest.raises(CheckpointError, match="differs from tiktoken's, so nothing was written: '.*' has the ids "):
        make_tokenizer(folder)
    assert not (folder / "tokenizer.json").exists() and not list(folder.glob(".tokenizer*"))


def test_what_cannot_be_made_is_named(ranks: dict[bytes, int], tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path / "kimi", ranks)
    (folder / "tokenization_kimi.py").write_text("pat_str = make_pattern()")
    with pytest.raises(
        CheckpointError, match="tokenization_kimi.py assigns no text to pat_str; fetch that file, or give --pattern"
    ):
        make_tokenizer(folder)
    (folder / "tokenization_kimi.py").unlink()
    with pytest.raises(CheckpointError, match="it has no tokenization_.*py; fetch that file, or give --pattern"):
        make_tokenizer(folder)
    assert make_tokenizer(folder, "|".join(PARTS)).num_special_tokens == 8
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_text("no vocabulary\n")
    with pytest.raises(CheckpointError, match="cannot be read as a vocabulary of tiktoken"):
        make_tokenizer(folder, "x")
    (folder / "tiktoken.model").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer: neither tokenizer.json, nor tiktoken.model"):
        make_tokenizer(folder)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    (tmp_path / "texts.txt").write_text("\n".join(text.replace("\n", " ") for text in proof_texts([])))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=820, model_type=kind,
        byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=True, minloglevel=2,
    )  # fmt: skip
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 820}))
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    if kind == "unigram":  # of splits that are equally likely, the libraries choose different ones
        with pytest.raises(CheckpointError, match="differs from SentencePiece's, so nothing was written"):
            make_tokenizer(folder)
        assert not (folder / "tokenizer.json").exists()
        return
    proof = make_tokenizer(folder)
    assert proof.kind == "SentencePiece" and proof.num_ids > 1000
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("Hello  world", "  two", "中文 x1", "ünknown 👍🏽"):
        assert made.encode(text, add_special_tokens=False).ids == original.encode(text)
