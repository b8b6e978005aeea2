"""From vocabulary pieces to bytes: the inverse of what byte-level BPE and SentencePiece write into a vocabulary.

Pure and dependency-free. Every token of the model families served is a fixed run of bytes, so text is the UTF-8
decoding of a concatenation: incremental and whole decoding cannot disagree, and no window of earlier tokens is needed.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

SPACE_MARK: Final = "▁"
"""U+2581, which SentencePiece writes for a space."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceAlphabet(Enum):
    """How a vocabulary spells bytes."""

    BYTE_LEVEL = "byte_level"
    """One printable character a byte, as GPT-2 does."""
    SENTENCEPIECE = "sentencepiece"
    """Plain text with U+2581 for a space."""


@dataclass(frozen=True, slots=True)
class PieceCoding:
    """How to read one vocabulary.

    Attributes:
        alphabet: Spelling of the pieces.
        has_byte_pieces: Whether ``<0xNN>`` is the byte NN (SentencePiece's byte fallback).
        drops_leading_space: Whether encoding puts a space before the text, so that decoding a whole text removes one.
    """

    alphabet: PieceAlphabet
    has_byte_pieces: bool = False
    drops_leading_space: bool = False

    def to_bytes(self, piece: str) -> bytes:
        """Give the bytes that a piece of the model's vocabulary stands for."""
        if self.alphabet is PieceAlphabet.BYTE_LEVEL:
            return _byte_level_bytes(piece)
        if self.has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return piece.replace(SPACE_MARK, " ").encode()


def _byte_by_character() -> dict[str, int]:
    """Build GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes are moved to U+0100 and up.

    Source: ``bytes_to_unicode`` in openai/gpt-2, src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(0x100) if byte not in set(printable))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


_BYTE_BY_CHARACTER: Final = _byte_by_character()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_BY_CHARACTER[character] for character in piece])
    except KeyError:
        # A character outside the alphabet: the piece was added as plain text.
        return piece.encode()
