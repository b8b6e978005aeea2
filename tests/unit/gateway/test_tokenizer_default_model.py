"""The default model's tokenizer against transformers reading the same file, and against a BPE written out here."""

import os
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from time import process_time

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.common.gguf_metadata import GgufMetadata
from services.gateway.chat_template import ChatTemplate
from services.gateway.detokenizer import Detokenizer
from services.gateway.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

NON_ASCII_DIGITS = "١٢٣ ½ ² Ⅷ ４２"
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\n\nnew\r\nlines\n \n  \n",
    " " * 37 + "x" + " " * 3,
    "0 12 345 6789 3.14159 1e-10 123abc456",
    NON_ASCII_DIGITS,
    "I'm you're they'll we've he'd it's I'M YOU'RE don’t",
    "def f(x: int) -> str:\n    return f'{x!r:>{10}}'  # comment\n\n\nclass A(B):\n\tpass\n",
    '{"a": [1, 2.5, null], "b": {"c": "d\\n"}}',
    "<html><body class='x'>&nbsp;</body></html>",
    "日本語とEnglish混じり。中文，标点！한국어 텍스트",
    "नमस्ते दुनिया, สวัสดี, שלום עולם, مرحبا بالعالم",
    "👋🏽 🧑‍🚀 🏳️‍🌈 ❤️ 👨‍👩‍👧‍👦",
    "e\u0301 é \u00a0 \u200b \u2028 \ufeff \U0010ffff \x00 \x7f",
    "ÀÉÎÕÜ ß ﬁ Ǆ ΑΒΓ абв ԱԲԳ",
    "!!!???...---___===+++***///\\\\\\|||",
    "https://example.com/a/b?c=d&e=%20#frag user@example.org",
    "a" * 300 + "ab" * 100,
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name><|im_end",
    "$E = mc^2$ \\frac{a}{b} ∑∫√≈≠∞",
    "The quick brown fox jumps over the lazy dog. " * 5,
]


def model_file() -> Path:
    root = os.environ.get("TREADLE_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "treadle"
    return Path(root).expanduser() / "models" / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(model_file())


@cache
def reference_tables() -> tuple[dict[str, int], dict[tuple[str, str], int], list[str]]:
    """Vocabulary, merge ranks and control tokens of the file."""
    with GgufMetadata(model_file()) as metadata:
        tokens = metadata.strings("tokenizer.ggml.tokens") or []
        merges = metadata.strings("tokenizer.ggml.merges") or []
        types = metadata.integers("tokenizer.ggml.token_type") or []
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    controls = [token for token, token_type in zip(tokens, types, strict=True) if token_type == 3]
    return {token: index for index, token in enumerate(tokens)}, ranks, controls


@cache
def character_by_byte() -> dict[int, str]:
    """GPT-2's byte alphabet."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(moved)}


def can_be_spelt(character: str) -> bool:
    id_by_token, _, _ = reference_tables()
    return all(character_by_byte()[byte] in id_by_token for byte in character.encode())


WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def reference_encode(text: str) -> list[int]:
    """Byte-level BPE by its definition: digits apart, GPT-2's words, then the best-ranked merge, leftmost first.

    The vocabulary lacks some bytes: of control characters and of the unassigned planes. They are left out
    before anything is merged, as the library does.
    """
    id_by_token, ranks, controls = reference_tables()
    ids: list[int] = []
    for part in regex.split("(" + "|".join(regex.escape(control) for control in controls) + ")", text):
        if part in controls:
            ids.append(id_by_token[part])
            continue
        for piece in regex.findall(r"\p{N}|[^\p{N}]+", part):
            for word in WORDS.findall(piece):
                symbols = [character_by_byte()[byte] for byte in word.encode()]
                symbols = [symbol for symbol in symbols if symbol in id_by_token]
                while ranked := [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]:
                    _, i = min(ranked)
                    symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
                ids += [id_by_token[symbol] for symbol in symbols]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_definition_of_bpe(tokenizer, text):
    assert tokenizer.encode(text, add_special_tokens=False) == reference_encode(text)


@settings(max_examples=200, deadline=None)
@example(text="\U00060dd2\U0008c000")
@given(text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab 12'\n\t")), max_size=40))
def test_ids_of_any_text_equal_the_definition_of_bpe(tokenizer, text):
    assert tokenizer.encode(text, add_special_tokens=False) == reference_encode(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]).filter(can_be_spelt), max_size=40))
def test_decoding_inverts_encoding_for_characters_that_the_vocabulary_can_spell(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_ids_and_text_equal_those_of_transformers(tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(model_file().parent), gguf_file=model_file().name)
    for text in TEXTS:
        if text == NON_ASCII_DIGITS:
            continue  # its GGUF reader ignores the pre-tokenizer's name, and so does not set digits apart
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_deltas_of_random_ids_join_to_the_librarys_decoding_for_every_grouping(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 100), max_size=60))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.feed(ids[start:end]) for start, end in pairwise([0, *cuts, len(ids)])]
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_detokenizing_long_random_ids_costs_the_same_for_each_token(tokenizer):
    ids = random.Random(1).choices(range(tokenizer.vocab_size), k=20_000)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.feed([token_id]) for token_id in ids) + detokenizer.flush() == tokenizer.decode(ids)


def test_facts_of_the_default_model(tokenizer):
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.model_max_length == 8192
    assert tokenizer.encode("hi", add_special_tokens=True) == tokenizer.encode("hi", add_special_tokens=False)


def test_chat_prompt_of_the_default_model(tokenizer):
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_token_texts)
    prompt = template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert [token_id for token_id in ids if tokenizer.is_special(token_id)] == [1, 2, 1, 2, 1]


def test_loading_stays_within_the_gateways_start_budget(tokenizer):
    start_s = process_time()
    load_tokenizer(model_file())
    assert process_time() - start_s < 1.0  # about 0.25 s; the gguf package's reader alone takes 4 s
