"""The detokenizer's laws: every grouping gives the text of the whole, and no delta splits a character."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenizer import Tokenizer, load_tokenizer
from tests.unit.gateway.tokenizer_files import write_byte_level_gguf, write_sentencepiece_gguf


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_byte_level_gguf(tmp_path_factory.mktemp("model") / "byte_level.gguf"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_sentencepiece_gguf(tmp_path_factory.mktemp("model") / "sentencepiece.gguf"))


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@st.composite
def grouped_ids(draw: st.DrawFn) -> list[list[int]]:
    """Draw ids, some of them unknown, in random groups."""
    ids = draw(st.lists(st.integers(0, 330), max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in pairwise([0, *cuts, len(ids)])]


@given(groups=grouped_ids(), skip_special_tokens=st.booleans())
def test_deltas_join_to_the_whole_decoding_for_every_grouping(tokenizer, groups, skip_special_tokens):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, at_text_start=True)
    deltas = [detokenizer.feed(group) for group in groups]
    ids = [token_id for group in groups for token_id in group]
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


# U+2581 is what SentencePiece writes for a space, so it comes back as one.
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=20))
def test_valid_text_survives_token_by_token_without_replacement_characters(tokenizer, text):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, at_text_start=True)
    deltas = [detokenizer.feed([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""


def test_character_of_four_byte_tokens_comes_out_once_and_whole(byte_level):
    ids = byte_level.encode("👋", add_special_tokens=False)
    detokenizer = Detokenizer(byte_level)
    assert len(ids) == 4
    assert [detokenizer.feed([token_id]) for token_id in ids] == ["", "", "", "👋"]


def test_incomplete_character_is_flushed_once_as_one_replacement(byte_level):
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.feed(byte_level.encode("a👋", add_special_tokens=False)[:-1]) == "a"
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_invalid_byte_is_replaced_as_soon_as_the_next_token_shows_it(byte_level):
    start_byte = byte_level.encode("日", add_special_tokens=False)[0]
    letter = byte_level.encode("a", add_special_tokens=False)
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.feed([start_byte]) == ""
    assert detokenizer.feed(letter) == "�a"


def test_continuation_keeps_the_leading_space_of_its_first_word(sentencepiece):
    ids = sentencepiece.encode("hello world", add_special_tokens=False)
    continuation = Detokenizer(sentencepiece)
    assert continuation.feed(ids[:1]) + continuation.feed(ids[1:]) == " hello world"


def test_text_of_its_own_drops_only_the_space_that_encoding_added(sentencepiece):
    ids = sentencepiece.encode("  hello", add_special_tokens=False)
    own = Detokenizer(sentencepiece, at_text_start=True)
    assert "".join(own.feed([token_id]) for token_id in ids) == "  hello"


def test_special_tokens_are_skipped_or_shown_by_option(byte_level):
    ids = byte_level.encode("a<|im_end|>b", add_special_tokens=False)
    assert Detokenizer(byte_level).feed(ids) == "ab"
    assert Detokenizer(byte_level, skip_special_tokens=False).feed(ids) == "a<|im_end|>b"


@pytest.mark.parametrize("unknown", [-1, 100_000, 2**63])
def test_unknown_id_adds_nothing(tokenizer, unknown):
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed([unknown]) == ""
    assert detokenizer.flush() == ""


def test_same_ids_in_other_groups_leave_the_same_state(byte_level):
    ids = byte_level.encode("日本", add_special_tokens=False)
    one_by_one, at_once = Detokenizer(byte_level), Detokenizer(byte_level)
    first = "".join(one_by_one.feed([token_id]) for token_id in ids[:4])
    assert at_once.feed(ids[:4]) == first == "日"
    assert one_by_one.feed(ids[4:]) == at_once.feed(ids[4:]) == "本"
