"""A tokenizer of single characters, for models that are small enough to train from nothing."""

import string
from pathlib import Path

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
"""Ids 0 to 3."""
CHARACTERS = "\n" + "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))
"""Newline and printable ASCII; ids from 4."""
NUM_USED_TOKENS = len(SPECIAL_TOKENS) + len(CHARACTERS)


def save_character_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write tokenizer files that transformers and vLLM load.

    Ids from NUM_USED_TOKENS to `vocab_size` are named but never come out of a text, so that every id that a model can
    sample has a name. Characters outside of CHARACTERS become <unk>. No token is added around a text.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    if vocab_size < NUM_USED_TOKENS:
        raise ValueError(f"vocab_size = {vocab_size}: the character tokenizer needs at least {NUM_USED_TOKENS} tokens")
    names = [*SPECIAL_TOKENS, *CHARACTERS, *(f"<unused_{n}>" for n in range(vocab_size - NUM_USED_TOKENS))]
    vocabulary = {name: number for number, name in enumerate(names)}
    # Byte-pair encoding without a single merge leaves each character by itself.
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
