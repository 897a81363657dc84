"""A model of SentencePiece as a tokenizer of the tokenizers library, piece by piece."""

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE = "\u2581"
"""SentencePiece writes a space as this character."""
_BPE = 2  # TrainerSpec.ModelType in sentencepiece_model.proto; 1 is a unigram model


def tokenizer_of(original: "SentencePieceProcessor") -> Tokenizer:
    """The same tokenizer. That it is the same is for the caller to prove: some models have features that this leaves out.

    Raises:
        ValueError: The model is neither a unigram model nor a byte-pair encoding.
    """
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # its classes are made at import
    proto = messages.ModelProto()
    proto.ParseFromString(original.serialized_model_proto())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    kinds = [type(piece).Type.Name(piece.type) for piece in proto.pieces]
    tokenizer = Tokenizer(_model(pieces, kinds, proto.trainer_spec.model_type, original.unk_id()))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else steps
    )
    of_kind = {kind: [piece for (piece, _), own in zip(pieces, kinds, strict=True) if own == kind] for kind in set(kinds)}
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in of_kind.get("CONTROL", ())])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in of_kind.get("USER_DEFINED", ())])
    return tokenizer


def _model(pieces: list[tuple[str, float]], kinds: list[str], model_type: int, unk_id: int) -> models.Model:
    has_bytes = "BYTE" in kinds
    if model_type != _BPE:
        return models.Unigram(pieces, unk_id=unk_id, byte_fallback=has_bytes)
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    scores = dict(pieces)
    mergeable = [piece for (piece, _), kind in zip(pieces, kinds, strict=True) if kind == "NORMAL" and len(piece) > 1]
    merges = []
    for piece in sorted(mergeable, key=lambda piece: -scores[piece]):
        splits = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += sorted(
            (pair for pair in splits if pair[0] in ids and pair[1] in ids), key=lambda pair: (ids[pair[0]], ids[pair[1]])
        )
    return models.BPE(ids, merges, unk_token=pieces[unk_id][0], fuse_unk=True, byte_fallback=has_bytes)


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
