"""Builds tiny tokenizers on disk, as GGUF files and as Hugging Face directories, without torch.

Two kinds: byte-level BPE with ChatML's special tokens, and SentencePiece BPE with byte fallback. Both encode any text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BYTE_LEVEL_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_LEVEL_MERGES = (
    *("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"),
    *("Ġ Ġ", "Ċ Ċ", "1 2", "Ã ©"),
)

SENTENCEPIECE_SPECIALS = ("<unk>", "<s>", "</s>")
SENTENCEPIECE_PIECES = (
    *("▁t", "he", "▁the", "ll", "hell", "▁hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁", "▁▁▁▁"),
    *("▁", *"abcdefghijklmnopqrstuvwxyz", *"0123456789.,!?'", "é", "日", "本"),
)


def byte_level_vocabulary() -> list[str]:
    """Texts of a byte-level vocabulary: specials, the 256 bytes, then the merges' results."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*BYTE_LEVEL_SPECIALS, *alphabet, *(merge.replace(" ", "") for merge in BYTE_LEVEL_MERGES)]


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Texts, scores and types of a SentencePiece vocabulary."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [*SENTENCEPIECE_SPECIALS, *byte_pieces, *SENTENCEPIECE_PIECES]
    scores = [0.0] * (3 + 256) + [-float(rank) for rank in range(len(SENTENCEPIECE_PIECES))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(SENTENCEPIECE_PIECES)]
    return texts, scores, types


def write_byte_level_gguf(path: Path, *, pre: str = "gpt-2", **metadata: Any) -> Path:
    """Write a GGUF file with the byte-level tokenizer; ``metadata`` overrides ``tokenizer.ggml.*`` keys."""
    texts = byte_level_vocabulary()
    types = [CONTROL] * len(BYTE_LEVEL_SPECIALS) + [NORMAL] * (len(texts) - len(BYTE_LEVEL_SPECIALS))
    return write_gguf(
        path,
        {
            "model": "gpt2",
            "pre": pre,
            "tokens": texts,
            "token_type": types,
            "merges": list(BYTE_LEVEL_MERGES),
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | metadata,
    )


def write_sentencepiece_gguf(path: Path, **metadata: Any) -> Path:
    """Write a GGUF file with the SentencePiece tokenizer; ``metadata`` overrides ``tokenizer.ggml.*`` keys."""
    texts, scores, types = sentencepiece_vocabulary()
    return write_gguf(
        path,
        {
            "model": "llama",
            "tokens": texts,
            "scores": scores,
            "token_type": types,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }
        | metadata,
    )


def write_gguf(path: Path, tokenizer_keys: Mapping[str, Any], *, chat_template: str | None = None) -> Path:
    """Write a GGUF file without tensors; keys with the value None are left out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.context_length", 512)
    for key, value in tokenizer_keys.items():
        name = f"tokenizer.ggml.{key}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    if chat_template is not None:
        writer.add_string("tokenizer.chat_template", chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_hf_directory(path: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """Write a model directory; ``files`` are JSON contents by file name with ``_json`` for ``.json``."""
    path.mkdir(exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name.removesuffix('_json')}.json").write_text(json.dumps(content))
    return path


def byte_level_tokenizer() -> Tokenizer:
    """Build the byte-level tokenizer with the library itself."""
    texts = byte_level_vocabulary()
    merges = [tuple(merge.split(" ")) for merge in BYTE_LEVEL_MERGES]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in BYTE_LEVEL_SPECIALS])
    return tokenizer
