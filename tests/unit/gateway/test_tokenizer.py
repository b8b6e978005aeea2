"""The tokenizer's own promises: what it refuses, and that long texts leave the event loop free."""

import asyncio

import pytest

from services.common.errors import EngineError, ErrorReason
from services.gateway.tokenizer import Tokenizer, load_tokenizer
from services.gateway.tokenizer.pieces import PieceAlphabet, PieceCoding
from tests.unit.gateway.tokenizer_files import write_byte_level_gguf


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_byte_level_gguf(tmp_path_factory.mktemp("model") / "m.gguf", add_bos_token=True))


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\ud83d\ud83d"])
def test_lone_surrogate_is_refused_and_the_field_named(tokenizer, text):
    with pytest.raises(EngineError) as caught:
        tokenizer.encode(text, add_special_tokens=False, field="messages[0].content")
    assert caught.value.reason is ErrorReason.INVALID_REQUEST
    assert caught.value.metadata["field"] == "messages[0].content"
    caught.value.message.encode()


async def test_lone_surrogate_in_a_long_text_is_refused_too(tokenizer):
    with pytest.raises(EngineError, match="lone surrogate at character 5000"):
        await tokenizer.encode_async("a" * 5000 + "\ud800", add_special_tokens=False)


def test_empty_text_has_only_the_special_tokens(tokenizer):
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.encode("", add_special_tokens=True) == [1]


@pytest.mark.parametrize("text", ["hello world", "hello 日本 12\n\n" * 2000])
@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_async_encoding_gives_the_same_ids(tokenizer, text, add_special_tokens):
    expected = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert await tokenizer.encode_async(text, add_special_tokens=add_special_tokens) == expected


async def test_event_loop_turns_while_a_long_text_is_encoded(tokenizer):
    num_turns = 0
    async with asyncio.TaskGroup() as group:
        encoding = group.create_task(tokenizer.encode_async("hello world " * 4000, add_special_tokens=False))
        while not encoding.done():
            num_turns += 1
            await asyncio.sleep(0)
    assert num_turns > 10  # 1, if the library held the interpreter lock


async def test_closed_tokenizer_still_encodes_short_texts(tmp_path):
    tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / "m.gguf"))
    await tokenizer.encode_async("a" * 5000, add_special_tokens=False)
    tokenizer.close()
    assert len(await tokenizer.encode_async("abc", add_special_tokens=False)) == 3


def test_ids_of_tokens_pass_the_check(tokenizer):
    tokenizer.check_token_ids(range(tokenizer.vocab_size), "prompt")


@pytest.mark.parametrize("bad", [-1, 10**6, 2**80])
def test_id_of_no_token_is_refused_and_its_place_named(tokenizer, bad):
    with pytest.raises(EngineError, match=r"prompt\[2\] is") as caught:
        tokenizer.check_token_ids([0, 1, bad], "prompt")
    assert caught.value.reason is ErrorReason.INVALID_REQUEST
    assert caught.value.metadata["field"] == "prompt"


def test_special_tokens_are_found_by_text(tokenizer):
    assert tokenizer.special_token_id("<|im_end|>") == 2
    assert tokenizer.special_token_id("hello") is None
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(5)


def test_token_bytes_join_to_the_text(tokenizer):
    ids = tokenizer.encode("é日本👋", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == "é日本👋".encode()


def test_token_text_shows_part_of_a_character_as_a_replacement(tokenizer):
    first = tokenizer.encode("日", add_special_tokens=False)[0]
    assert tokenizer.token_text(first) == "�"


@pytest.mark.parametrize(
    ("coding", "piece", "expected"),
    [
        (PieceCoding(PieceAlphabet.BYTE_LEVEL), "Ġhello", b" hello"),
        (PieceCoding(PieceAlphabet.BYTE_LEVEL), "ĠĊĉč", b" \n\t\r"),
        (PieceCoding(PieceAlphabet.BYTE_LEVEL), "Ã©", "é".encode()),
        (PieceCoding(PieceAlphabet.BYTE_LEVEL), "<｜User｜>", "<｜User｜>".encode()),
        (PieceCoding(PieceAlphabet.SENTENCEPIECE), "▁a▁b", b" a b"),
        (PieceCoding(PieceAlphabet.SENTENCEPIECE), "<0x0A>", b"<0x0A>"),
        (PieceCoding(PieceAlphabet.SENTENCEPIECE, has_byte_pieces=True), "<0x0A>", b"\n"),
        (PieceCoding(PieceAlphabet.SENTENCEPIECE, has_byte_pieces=True), "<0x0A>x", b"<0x0A>x"),
    ],
)
def test_pieces_stand_for_their_bytes(coding, piece, expected):
    assert coding.to_bytes(piece) == expected


def test_byte_level_alphabet_covers_every_byte_once(tokenizer):
    assert sorted(tokenizer.token_bytes(token_id) for token_id in range(3, 259)) == [bytes([b]) for b in range(256)]


@pytest.mark.parametrize("text", ["", "a", "hello world " * 50, "é" * 99, "  \n\n" * 40])
def test_lower_bound_of_the_number_of_tokens_holds(tokenizer, text):
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
