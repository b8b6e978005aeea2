"""Tokenizers of GGUF files: ids against independent implementations of the two algorithms, and the metadata's flags."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import EngineError, ErrorReason
from services.gateway.tokenizer import Tokenizer, load_tokenizer
from tests.unit.gateway.tokenizer_files import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level_tokenizer,
    byte_level_vocabulary,
    sentencepiece_vocabulary,
    write_byte_level_gguf,
    write_gguf,
    write_sentencepiece_gguf,
)

# Without "<", so that no special token is spelt out, and U+2581, which SentencePiece takes for a space.
characters = st.one_of(
    st.sampled_from("helowrd 12\né日"), st.characters(exclude_categories=["Cs"], exclude_characters="▁<")
)
texts = st.text(characters, max_size=24)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_byte_level_gguf(tmp_path_factory.mktemp("model") / "byte_level.gguf"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_sentencepiece_gguf(tmp_path_factory.mktemp("model") / "sentencepiece.gguf"))


def load_byte_level(path: Path, **metadata: object) -> Tokenizer:
    return load_tokenizer(write_byte_level_gguf(path / "model.gguf", **metadata))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def refusal(path: Path) -> str:
    with pytest.raises(EngineError) as caught:
        load_tokenizer(path)
    assert caught.value.reason is ErrorReason.MODEL_LOAD_FAILED
    return caught.value.message


def sentencepiece_reference(text: str) -> list[int]:
    """SentencePiece's BPE by its definition: merge the neighbours with the best score, the leftmost first."""
    pieces, scores, _ = sentencepiece_vocabulary()
    id_by_piece = {piece: index for index, piece in enumerate(pieces)}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        candidates = [
            (-scores[id_by_piece[pair]], index)
            for index, pair in enumerate(a + b for a, b in pairwise(symbols))
            if pair in id_by_piece and not pair.startswith("<")
        ]
        if not candidates:
            break
        _, index = min(candidates)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    ids = []
    for symbol in symbols:
        known = id_by_piece.get(symbol)
        ids += [known] if known is not None else [id_by_piece[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@given(text=texts)
def test_byte_level_ids_equal_those_of_the_library_built_by_hand(byte_level, text):
    assert encode(byte_level, text) == byte_level_tokenizer().encode(text).ids


@given(text=texts)
def test_sentencepiece_ids_equal_the_definition_of_its_bpe(sentencepiece, text):
    assert encode(sentencepiece, text) == sentencepiece_reference(text)


@given(text=texts)
def test_decoding_inverts_encoding(byte_level, sentencepiece, text):
    assert byte_level.decode(encode(byte_level, text), skip_special_tokens=False) == text
    assert sentencepiece.decode(encode(sentencepiece, text), skip_special_tokens=False) == text


@given(text=texts)
def test_decoding_equals_the_librarys_for_valid_text(sentencepiece, text):
    ids = encode(sentencepiece, text)
    assert sentencepiece.decode(ids) == sentencepiece._backend.decode(ids)


def test_special_tokens_in_text_are_recognised(byte_level):
    assert encode(byte_level, "<|im_start|>hello<|im_end|>") == [1, *encode(byte_level, "hello"), 2]


def test_facts_come_from_the_metadata(byte_level):
    assert byte_level.vocab_size == len(byte_level_vocabulary())
    assert byte_level.bos_token_id == 1
    assert byte_level.special_token_texts == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert byte_level.model_max_length == 512
    assert byte_level.chat_template is None


def test_end_tokens_are_those_named_and_those_known_by_text(byte_level):
    assert byte_level.eos_token_ids == {0, 2}  # <|endoftext|> by its text, <|im_end|> by the metadata


def test_end_of_turn_token_is_an_end_token(tmp_path):
    tokenizer = load_byte_level(tmp_path, eos_token_id=0, eot_token_id=1)
    assert tokenizer.eos_token_ids == {0, 1, 2}


def test_chat_template_is_read(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]},
        chat_template="{{ messages }}",
    )
    assert load_tokenizer(path).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, ([], [])),
        ("gpt-2", {"add_bos_token": True}, ([1], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ("gpt-2", {"add_bos_token": False, "add_eos_token": True}, ([], [2])),
        ("llama-bpe", {}, ([1], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
    ],
)
def test_bos_and_eos_are_added_as_flags_or_family_say(tmp_path, pre, flags, expected):
    tokenizer = load_byte_level(tmp_path, pre=pre, **flags)
    before, after = expected
    plain = encode(tokenizer, "hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == [*before, *plain, *after]


def test_sentencepiece_adds_bos_by_default(sentencepiece):
    assert sentencepiece.encode("hello", add_special_tokens=True) == [1, *encode(sentencepiece, "hello")]


def test_sentencepiece_without_space_prefix_adds_and_drops_none(tmp_path):
    tokenizer = load_tokenizer(write_sentencepiece_gguf(tmp_path / "m.gguf", add_space_prefix=False))
    ids = encode(tokenizer, " hello")
    assert [tokenizer.token_text(token_id) for token_id in ids] == [" hello"]
    assert tokenizer.decode(ids) == " hello"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["ab", " 1234", "'s", "  ", " x", ".\n"]),
        ("smollm", ["ab", " ", "1", "2", "3", "4", "'s", "  ", " x", ".\n"]),
        ("llama-bpe", ["ab", " ", "123", "4", "'s", "  ", " x", ".\n"]),
        ("qwen2", ["ab", " ", "1", "2", "3", "4", "'s", "  ", " x", ".\n"]),
        ("tekken", ["ab", " ", "1", "2", "3", "4", "'s", "  ", " x", ".\n"]),
    ],
)
def test_families_cut_words_as_their_published_tokenizers_do(tmp_path, pre, words):
    tokenizer = load_byte_level(tmp_path, pre=pre)
    text = "ab 1234's   x.\n"
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    expected = words if pre != "gpt-2" and pre != "smollm" else [*words[:-1], ".", "\n"]
    assert [text[start:end] for _, (start, end) in pieces] == expected


def test_qwen_normalizes_to_composed_form(tmp_path):
    tokenizer = load_byte_level(tmp_path, pre="qwen2")
    assert encode(tokenizer, "e\u0301") == encode(tokenizer, "é")


def test_llama3_takes_a_known_word_whole_without_merging(tmp_path):
    texts_ = [*byte_level_vocabulary(), "zq"]
    types = [CONTROL] * 3 + [NORMAL] * (len(texts_) - 3)
    tokenizer = load_byte_level(tmp_path, pre="llama-bpe", tokens=texts_, token_type=types)
    assert encode(tokenizer, "zq") == [len(texts_) - 1]


def test_user_defined_tokens_are_matched_first_and_are_not_special(tmp_path):
    texts_ = [*byte_level_vocabulary(), "<tool>"]
    types = [CONTROL] * 3 + [NORMAL] * (len(texts_) - 4) + [USER_DEFINED]
    tokenizer = load_byte_level(tmp_path, tokens=texts_, token_type=types)
    ids = encode(tokenizer, "a<tool>")
    assert ids[-1] == len(texts_) - 1
    assert tokenizer.decode(ids) == "a<tool>"


def test_padding_rows_are_no_tokens(tmp_path):
    texts_ = [*byte_level_vocabulary(), "[PAD0]", "[PAD1]"]
    types = [CONTROL] * 3 + [NORMAL] * (len(texts_) - 5) + [UNUSED] * 2
    tokenizer = load_byte_level(tmp_path, tokens=texts_, token_type=types)
    assert tokenizer.vocab_size == len(texts_) - 2
    assert not tokenizer.has(len(texts_) - 1)
    assert tokenizer.decode([len(texts_) - 1]) == ""


def test_unknown_pre_tokenizer_is_refused_with_those_known(tmp_path):
    message = refusal(write_byte_level_gguf(tmp_path / "m.gguf", pre="chameleon"))
    assert "'chameleon' is not supported" in message
    assert "llama-bpe" in message


def test_unknown_tokenizer_model_is_refused(tmp_path):
    assert "'bert' is not supported" in refusal(write_byte_level_gguf(tmp_path / "m.gguf", model="bert"))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"tokens": None}, "holds no tokenizer"),
        ({"merges": None}, "has no merges"),
        ({"merges": ["q qqq"]}, "merges do not fit"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"eos_token_id": 99_999}, "eos_token_id is 99999"),
    ],
)
def test_incomplete_metadata_is_refused(tmp_path, metadata, text):
    assert text in refusal(write_byte_level_gguf(tmp_path / "m.gguf", **metadata))


def test_padding_id_outside_the_vocabulary_is_ignored(tmp_path):
    assert "pad_token" not in load_byte_level(tmp_path, padding_token_id=99_999).special_token_texts


@pytest.mark.parametrize(
    ("metadata", "text"),
    [({"scores": None}, "lacks a score"), ({"unknown_token_id": 99_999}, "unknown_token_id is 99999")],
)
def test_incomplete_sentencepiece_metadata_is_refused(tmp_path, metadata, text):
    assert text in refusal(write_sentencepiece_gguf(tmp_path / "m.gguf", **metadata))


def test_absent_path_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent")
