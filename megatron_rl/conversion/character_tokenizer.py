"""A tokenizer of single characters, for models that are small enough to train from scratch."""

import string
from pathlib import Path

from megatron_rl.conversion.errors import CheckpointError

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
"""Ids 0 to 3."""
CHARACTERS = "\n" + "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))
"""Newline and printable ASCII; ids from 4."""
NUM_USED_TOKENS = len(SPECIAL_TOKENS) + len(CHARACTERS)


def save_character_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write tokenizer files that transformers and vLLM load.

    Ids from NUM_USED_TOKENS to `vocab_size` have names but encode no text, so that every id that a model can sample has a name.
    Characters outside of CHARACTERS become <unk>. No token is added around a text.

    Args:
        folder: Where the files are written.
        vocab_size: The model's.
        max_length: Longest text, in tokens.

    Raises:
        CheckpointError: `vocab_size` is too small.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    if vocab_size < NUM_USED_TOKENS:
        raise CheckpointError(
            f"vocab_size = {vocab_size}: the character tokenizer needs at least {NUM_USED_TOKENS} tokens; raise vocab_size"
        )
    names = [*SPECIAL_TOKENS, *CHARACTERS, *(f"<unused_{n}>" for n in range(vocab_size - NUM_USED_TOKENS))]
    vocabulary = {name: number for number, name in enumerate(names)}
    # Byte-pair encoding without merges leaves each character by itself.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    pad, eos, bos, unk = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        unk_token=unk,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
