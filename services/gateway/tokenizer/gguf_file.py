"""Builds a tokenizer from the ``tokenizer.*`` metadata of a GGUF file.

Two kinds exist in the model families served: byte-level BPE (``gpt2``) with explicit merges, and SentencePiece BPE
(``llama``), whose merges are implied by the pieces' scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from services.common.errors import EngineError, ErrorReason
from services.common.gguf_metadata import GgufMetadata
from services.gateway.tokenizer.pieces import SPACE_MARK, PieceAlphabet, PieceCoding
from services.gateway.tokenizer.pre_tokenizers import bpe_family
from services.gateway.tokenizer.surroundings import surround
from services.gateway.tokenizer.tokenizer import Tokenizer, TokenizerFacts

_PREFIX: Final = "tokenizer.ggml."

_END_TOKEN_TEXTS: Final = frozenset(
    {
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
    }
)
"""Control tokens that end a turn whatever the metadata says, since converters often name only one of several."""

_NAMED_TOKENS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_TOKEN_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


class _TokenType(IntEnum):
    """Kinds of vocabulary entries, by their number in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The file's token list.

    Attributes:
        id_by_text: Real tokens; entries that only pad the embedding are left out.
        controls: Ids of control and unknown tokens.
        user_defined: Ids of tokens that are matched as plain text before anything else.
    """

    id_by_text: dict[str, int]
    controls: list[int]
    user_defined: list[int]
    texts: list[str]


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Read a GGUF file's tokenizer.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when the file is damaged, or has no tokenizer or one of an unsupported kind.
    """
    with GgufMetadata(path) as metadata:
        vocabulary = _read_vocabulary(metadata)
        _check_named_ids(metadata, vocabulary)
        kind = metadata.string(_PREFIX + "model")
        if kind == "gpt2":
            backend, coding, adds_bos = _build_byte_level(metadata, vocabulary)
        elif kind == "llama":
            backend, coding, adds_bos = _build_sentencepiece(metadata, vocabulary)
        else:
            raise _failure(
                metadata, f"its tokenizer model {kind!r} is not supported; 'gpt2' (byte-level BPE) and 'llama' are"
            )
        facts = _read_facts(metadata, vocabulary, coding)
        _add_special_tokens(backend, vocabulary)
        _add_bos_and_eos(backend, metadata, vocabulary, adds_bos=adds_bos)
    return Tokenizer(backend, facts)


def _read_vocabulary(metadata: GgufMetadata) -> _Vocabulary:
    texts = metadata.strings(_PREFIX + "tokens")
    if not texts:
        raise _failure(metadata, "it holds no tokenizer (tokenizer.ggml.tokens)")
    types = metadata.integers(_PREFIX + "token_type") or [_TokenType.NORMAL] * len(texts)
    if len(types) != len(texts):
        raise _failure(metadata, f"it has {len(texts)} tokens and {len(types)} token types")
    ids_by_type: dict[int, list[int]] = {token_type: [] for token_type in _TokenType}
    for token_id, token_type in enumerate(types):
        ids_by_type.setdefault(token_type, []).append(token_id)
    id_by_text = {text: token_id for token_id, text in enumerate(texts)}
    for token_id in ids_by_type[_TokenType.UNUSED]:
        id_by_text.pop(texts[token_id], None)
    controls = ids_by_type[_TokenType.UNKNOWN] + ids_by_type[_TokenType.CONTROL]
    return _Vocabulary(id_by_text, controls, ids_by_type[_TokenType.USER_DEFINED], texts)


def _check_named_ids(metadata: GgufMetadata, vocabulary: _Vocabulary) -> None:
    """Refuse ids outside the vocabulary, except for padding, which is never used here and often wrong."""
    for key in ("bos_token_id", "unknown_token_id", *_END_TOKEN_KEYS):
        token_id = metadata.integer(_PREFIX + key)
        if token_id is not None and not 0 <= token_id < len(vocabulary.texts):
            raise _failure(metadata, f"its {key} is {token_id} and it has {len(vocabulary.texts)} tokens")


def _build_byte_level(metadata: GgufMetadata, vocabulary: _Vocabulary) -> tuple[Backend, PieceCoding, bool]:
    family = bpe_family(metadata.string(_PREFIX + "pre") or "default")
    merges = metadata.strings(_PREFIX + "merges")
    if merges is None:
        raise _failure(metadata, "its byte-level BPE tokenizer has no merges (tokenizer.ggml.merges)")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocabulary.id_by_text, pairs, ignore_merges=family.ignores_merges)
    except Exception as error:  # the library raises plain Exception for a merge that is not in the vocabulary
        raise _failure(metadata, f"its merges do not fit its vocabulary ({error})") from error
    backend = Backend(model)
    if family.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    add_prefix_space = metadata.boolean(_PREFIX + "add_space_prefix") or False
    backend.pre_tokenizer = family.pre_tokenizer(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend, PieceCoding(PieceAlphabet.BYTE_LEVEL), family.adds_bos


def _build_sentencepiece(metadata: GgufMetadata, vocabulary: _Vocabulary) -> tuple[Backend, PieceCoding, bool]:
    scores = metadata.floats(_PREFIX + "scores")
    if scores is None or len(scores) != len(vocabulary.texts):
        raise _failure(metadata, "its SentencePiece tokenizer lacks a score for each token (tokenizer.ggml.scores)")
    unknown_id = metadata.integer(_PREFIX + "unknown_token_id") or 0
    model = models.BPE(
        vocabulary.id_by_text,
        list(_implied_merges(vocabulary, scores)),
        unk_token=vocabulary.texts[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    has_prefix = metadata.boolean(_PREFIX + "add_space_prefix")
    has_prefix = True if has_prefix is None else has_prefix
    mark_spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark_spaces]) if has_prefix else mark_spaces
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    coding = PieceCoding(PieceAlphabet.SENTENCEPIECE, has_byte_pieces=True, drops_leading_space=has_prefix)
    return backend, coding, True


def _implied_merges(vocabulary: _Vocabulary, scores: list[float]) -> Iterator[tuple[str, str]]:
    """Give the merges that SentencePiece's BPE applies, best first.

    SentencePiece merges the neighbours whose union has the highest score, so every way to split a piece into two pieces
    is a merge with the piece's score. Control, user-defined and byte pieces never come out of a merge.
    """
    id_by_text = vocabulary.id_by_text
    excluded = {*vocabulary.controls, *vocabulary.user_defined}
    pieces = [(text, i) for text, i in id_by_text.items() if len(text) > 1 and i not in excluded]
    pieces.sort(key=lambda piece: (-scores[piece[1]], piece[1]))
    for text, _ in pieces:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in id_by_text and right in id_by_text:
                yield left, right


def _add_special_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Have the library recognise control and user-defined tokens before it cuts and merges."""
    texts = vocabulary.texts
    backend.add_special_tokens([AddedToken(texts[i], special=True, normalized=False) for i in vocabulary.controls])
    backend.add_tokens([AddedToken(texts[i], special=False, normalized=False) for i in vocabulary.user_defined])


def _add_bos_and_eos(backend: Backend, metadata: GgufMetadata, vocabulary: _Vocabulary, *, adds_bos: bool) -> None:
    """Put BOS and EOS around a text as the metadata says, or as the kind of tokenizer does by default."""
    wants_bos = metadata.boolean(_PREFIX + "add_bos_token")
    bos_id = metadata.integer(_PREFIX + "bos_token_id") if (adds_bos if wants_bos is None else wants_bos) else None
    eos_id = metadata.integer(_PREFIX + "eos_token_id") if metadata.boolean(_PREFIX + "add_eos_token") else None
    surround(
        backend,
        bos=None if bos_id is None else vocabulary.texts[bos_id],
        eos=None if eos_id is None else vocabulary.texts[eos_id],
    )


def _read_facts(metadata: GgufMetadata, vocabulary: _Vocabulary, coding: PieceCoding) -> TokenizerFacts:
    end_ids = {metadata.integer(_PREFIX + key) for key in _END_TOKEN_KEYS}
    end_ids |= {i for i in vocabulary.controls if vocabulary.texts[i] in _END_TOKEN_TEXTS}
    named = {name: metadata.integer(_PREFIX + key) for name, key in _NAMED_TOKENS.items()}
    if not 0 <= (named["pad_token"] or 0) < len(vocabulary.texts):
        named["pad_token"] = None
    architecture = metadata.string("general.architecture")
    return TokenizerFacts(
        coding=coding,
        eos_token_ids=frozenset(i for i in end_ids if i is not None),
        bos_token_id=named["bos_token"],
        special_token_texts={name: vocabulary.texts[i] for name, i in named.items() if i is not None},
        chat_template=metadata.string("tokenizer.chat_template"),
        model_max_length=metadata.integer(f"{architecture}.context_length"),
    )


def _failure(metadata: GgufMetadata, text: str) -> EngineError:
    return EngineError(ErrorReason.MODEL_LOAD_FAILED, f"{metadata.path}: {text}.", path=str(metadata.path))
