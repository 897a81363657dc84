"""Makes tokenizer.json for a model folder that has the vocabulary of tiktoken or of SentencePiece instead, and proves it.

Kimi-K2 and Moonlight are published with tiktoken.model and a tokenizer class of their own. Of its Python file the pattern that
splits text is read, as a literal; nothing of it is run.
"""

import ast
import base64
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.model_files import read_json
from megatron_rl.conversion.sentencepiece_model import tokenizer_of

TOKENIZER_FILE = "tokenizer.json"
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_PATTERN_NAME = "pat_str"


@dataclass(frozen=True)
class Original:
    """The tokenizer that a folder ships."""

    kind: str
    """tiktoken or SentencePiece."""
    file: Path
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    special_tokens: Sequence[str]


@dataclass(frozen=True)
class Proof:
    """What was compared."""

    kind: str
    file: Path
    num_texts: int
    num_ids: int
    num_special_tokens: int


def original_file(folder: Path) -> Path | None:
    """The vocabulary from which `make_tokenizer` can make tokenizer.json; None: the folder has none."""
    tiktoken = sorted([*folder.glob("tiktoken.model"), *folder.glob("*.tiktoken")])
    return next(iter(tiktoken), None) or next((folder / name for name in _SENTENCEPIECE_FILES if (folder / name).exists()), None)


def make_tokenizer(folder: Path, pattern: str | None = None) -> Proof:
    """Write tokenizer.json into a folder, once it gives the ids and the text of the folder's own tokenizer.

    Args:
        folder: A model folder without tokenizer.json.
        pattern: The expression by which tiktoken splits text, in place of `pat_str` in the folder's tokenization_*.py.

    Returns:
        What was compared.

    Raises:
        CheckpointError: The folder has no such tokenizer, or the two differ; then nothing is written.
    """
    if (folder / TOKENIZER_FILE).exists():
        raise CheckpointError(f"{folder} has {TOKENIZER_FILE} already; remove it first if another one is to be made")
    if (file := original_file(folder)) is None:
        raise CheckpointError(
            f"{folder} has no tokenizer: neither {TOKENIZER_FILE}, nor tiktoken.model, *.tiktoken, or "
            f"{', '.join(_SENTENCEPIECE_FILES)}; fetch the tokenizer's files"
        )
    is_sentencepiece = file.name in _SENTENCEPIECE_FILES
    made, original = _from_sentencepiece(file) if is_sentencepiece else _from_tiktoken(folder, file, pattern)
    made = Tokenizer.from_str(made.to_str())  # as it will be read
    proof = _prove(made, original)
    part = folder / f".{TOKENIZER_FILE}.part"
    made.save(str(part))
    part.replace(folder / TOKENIZER_FILE)
    return proof


def _from_tiktoken(folder: Path, file: Path, pattern: str | None) -> tuple[Tokenizer, Original]:
    import tiktoken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = pattern if pattern is not None else _pattern_of(folder)
    try:
        ranks = _ranks_of(file)
        special = _special_tokens(folder, len(ranks))
        original = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except (ValueError, AssertionError) as error:  # what tiktoken raises for damaged files and patterns
        raise CheckpointError(f"{file}: cannot be read as a vocabulary of tiktoken ({error}); fetch it again") from error
    converter = TikTokenConverter(vocab_file=str(file), pattern=pattern, extra_special_tokens=list(special))
    vars(converter)["load_tiktoken_bpe"] = lambda _: ranks
    made = converter.converted()
    own = Original("tiktoken", file, lambda text: original.encode(text, allowed_special="all"), original.decode, list(special))
    return made, own


def _ranks_of(file: Path) -> dict[bytes, int]:
    """A line a token: its bytes in base64, and its id. tiktoken's own reader keeps what it once read from a path."""
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}


def _pattern_of(folder: Path) -> str:
    """The literal that is assigned to `pat_str`: a string, or strings that are joined by one."""
    files = sorted(folder.glob("tokenization_*.py"))
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(getattr(target, "id", getattr(target, "attr", None)) == _PATTERN_NAME for target in targets):
                found = _text_of(getattr(node, "value", None))
                if found is not None:
                    return found
    looked = (
        f"{', '.join(file.name for file in files)} assigns no text to {_PATTERN_NAME}" if files else "it has no tokenization_*.py"
    )
    raise CheckpointError(
        f"{folder}: the pattern by which tiktoken splits text is not known, since {looked}; fetch that file, or give --pattern"
    )


def _text_of(value: Any) -> str | None:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(joint)), attr="join"), args=[ast.List() | ast.Tuple() as parts]
        ):
            texts = [_text_of(part) for part in parts.elts]
            return None if None in texts else joint.join(text for text in texts if text is not None)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = [_text_of(left), _text_of(right)]
            return None if None in texts else "".join(text for text in texts if text is not None)
    return None


def _special_tokens(folder: Path, num_ranks: int) -> dict[str, int]:
    """Names of tokenizer_config.json; the other ids up to vocab_size are reserved, as Kimi-K2 and Moonlight name them."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.exists() else {}
    named = {int(i): str(entry["content"]) for i, entry in settings.get("added_tokens_decoder", {}).items()}
    vocab_size = read_json(folder / "config.json").get("vocab_size", 0) if (folder / "config.json").exists() else 0
    last = max([vocab_size, *(i + 1 for i in named)])
    return {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(num_ranks, last)}


def _from_sentencepiece(file: Path) -> tuple[Tokenizer, Original]:
    import sentencepiece

    try:
        original = sentencepiece.SentencePieceProcessor(model_file=str(file))
        made = tokenizer_of(original)
    except Exception as error:  # the library does not say what it raises
        raise CheckpointError(
            f"{file}: cannot be read as a model of SentencePiece ({type(error).__name__}: {error}); fetch it again"
        ) from error
    return made, Original("SentencePiece", file, original.encode, lambda ids: original.decode(list(ids)), [])


def _prove(made: Tokenizer, original: Original) -> Proof:
    num_texts = num_ids = 0
    for text in proof_texts(original.special_tokens):
        expected = list(original.encode(text))
        found = made.encode(text, add_special_tokens=False).ids
        if found != expected:
            raise CheckpointError(
                f"{original.file}: the tokenizer made from it differs from {original.kind}'s, so nothing was written: {text!r} "
                f"has the ids {found[:24]}, and {expected[:24]} by {original.kind}"
            )
        back, wanted = made.decode(found, skip_special_tokens=False), original.decode(expected)
        if back != wanted:
            raise CheckpointError(
                f"{original.file}: the tokenizer made from it differs from {original.kind}'s, so nothing was written: the ids "
                f"{found[:24]} read {back!r}, and {wanted!r} by {original.kind}"
            )
        num_texts, num_ids = num_texts + 1, num_ids + len(found)
    return Proof(original.kind, original.file, num_texts, num_ids, len(original.special_tokens))


_TEXTS_FILE = Path(__file__).with_name("proof_texts.json")
_NUM_RANDOM = 400


def proof_texts(special_tokens: Sequence[str]) -> Iterator[str]:
    """Several scripts, code, numbers, white space, random mixtures of them, and every special token, alone and within a text."""
    known, rng = read_json(_TEXTS_FILE), random.Random(0)
    yield from known["texts"]
    for _ in range(_NUM_RANDOM):
        yield "".join(rng.choice(rng.choice(known["alphabets"])) for _ in range(rng.randint(1, 40)))
    for token in special_tokens:
        yield token
        yield f"a {token}b\n{token}{token} 12"
