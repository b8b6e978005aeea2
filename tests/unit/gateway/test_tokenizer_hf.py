"""Tokenizers of Hugging Face directories: where each fact is found, and which kinds are refused."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors

from services.common.errors import EngineError, ErrorReason
from services.gateway.tokenizer import Tokenizer, load_tokenizer
from tests.unit.gateway.tokenizer_files import byte_level_tokenizer, byte_level_vocabulary, write_hf_directory


def load(path: Path, backend: Backend | None = None, **files: object) -> Tokenizer:
    return load_tokenizer(write_hf_directory(path / "model", backend, **files))


def refusal(path: Path) -> str:
    with pytest.raises(EngineError) as caught:
        load_tokenizer(path)
    assert caught.value.reason is ErrorReason.MODEL_LOAD_FAILED
    return caught.value.message


def sentencepiece_like(*decoder_steps: decoders.Decoder) -> Backend:
    backend = Backend(models.BPE({"<unk>": 0, "▁": 1, "a": 2, "<0x0A>": 3, "▁a": 4}, [("▁", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(list(decoder_steps))
    return backend


def test_ids_are_those_of_tokenizer_json(tmp_path):
    text = "hello world, <|im_start|>12  é\n\n"
    assert load(tmp_path).encode(text, add_special_tokens=False) == byte_level_tokenizer().encode(text).ids


def test_end_tokens_are_joined_from_all_files(tmp_path):
    tokenizer = load(
        tmp_path,
        generation_config_json={"eos_token_id": [2, 7]},
        config_json={"eos_token_id": 9},
        tokenizer_config_json={"eos_token": "<|endoftext|>"},
    )
    assert tokenizer.eos_token_ids == {0, 2, 7, 9}


def test_special_tokens_may_be_strings_or_objects(tmp_path):
    tokenizer = load(
        tmp_path,
        tokenizer_config_json={"bos_token": {"content": "<|im_start|>", "lstrip": False}, "pad_token": None},
        special_tokens_map_json={"eos_token": "<|im_end|>", "bos_token": "ignored"},
    )
    assert tokenizer.special_token_texts == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}


def test_directory_without_any_configuration_has_no_facts(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None
    assert tokenizer.model_max_length is None


@pytest.mark.parametrize(("stated", "expected"), [(2048, 2048), (1e30, None), (True, None), ("8", None), (0, None)])
def test_model_max_length_is_taken_when_plausible(tmp_path, stated, expected):
    assert load(tmp_path, tokenizer_config_json={"model_max_length": stated}).model_max_length == expected


def test_chat_template_of_tokenizer_config_is_found(tmp_path):
    assert load(tmp_path, tokenizer_config_json={"chat_template": "T"}).chat_template == "T"


def test_default_is_taken_of_several_chat_templates(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert load(tmp_path, tokenizer_config_json={"chat_template": named}).chat_template == "plain"


def test_chat_template_json_goes_before_tokenizer_config(tmp_path):
    files = {"chat_template_json": {"chat_template": "new"}, "tokenizer_config_json": {"chat_template": "old"}}
    assert load(tmp_path, **files).chat_template == "new"


def test_chat_template_jinja_goes_before_everything(tmp_path):
    directory = write_hf_directory(tmp_path / "model", tokenizer_config_json={"chat_template": "old"})
    (directory / "chat_template.jinja").write_text("{{ newest }}\n")
    assert load_tokenizer(directory).chat_template == "{{ newest }}\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ([1], [2])),
        ({"add_bos_token": True}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ({"add_eos_token": True}, ([], [2])),
    ],
)
def test_explicit_flags_overrule_the_post_processor(tmp_path, flags, expected):
    backend = byte_level_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = load(tmp_path, backend, tokenizer_config_json=names | flags)
    before, after = expected
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=True) == [*before, *plain, *after]


def test_flag_without_a_token_adds_nothing(tmp_path):
    tokenizer = load(tmp_path, tokenizer_config_json={"add_bos_token": True, "bos_token": "<absent>"})
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a", add_special_tokens=False)


def test_truncation_and_padding_of_a_training_run_are_switched_off(tmp_path):
    backend = byte_level_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(load(tmp_path, backend).encode("abcdef", add_special_tokens=True)) == 6


def test_sentencepiece_decoder_of_steps_is_recognised(tmp_path):
    backend = sentencepiece_like(
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    )
    tokenizer = load(tmp_path, backend)
    assert tokenizer.drops_leading_space
    assert tokenizer.decode([4, 3, 4]) == "a\n a"


def test_metaspace_decoder_is_recognised(tmp_path):
    tokenizer = load(tmp_path, sentencepiece_like(decoders.Metaspace(prepend_scheme="never")))
    assert not tokenizer.drops_leading_space
    assert tokenizer.decode([4, 3]) == " a<0x0A>"


def test_other_decoders_are_refused(tmp_path):
    directory = write_hf_directory(tmp_path / "model", sentencepiece_like(decoders.WordPiece()))
    assert "decoder ['WordPiece']" in refusal(directory)


def test_missing_tokenizer_json_is_refused(tmp_path):
    assert "there is no tokenizer.json" in refusal(tmp_path)


def test_damaged_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version":')
    assert "tokenizer.json cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_damaged_configuration_is_refused_by_name(tmp_path, content):
    directory = write_hf_directory(tmp_path / "model")
    (directory / "generation_config.json").write_text(content)
    assert "generation_config.json" in refusal(directory)


def test_vocabulary_with_a_gap_knows_which_ids_are_tokens(tmp_path):
    backend = Backend(models.BPE({"a": 0, "b": 5}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = load(tmp_path, backend)
    assert tokenizer.vocab_size == 6
    assert [token_id for token_id in range(-1, 8) if tokenizer.has(token_id)] == [0, 5]
    assert tokenizer.decode([0, 3, 5]) == "ab"


def test_vocabulary_without_gaps_knows_its_size(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == len(byte_level_vocabulary())
    assert not tokenizer.has(tokenizer.vocab_size)


def test_text_that_spells_a_token_beyond_the_embedding_is_refused(tmp_path):
    backend = byte_level_tokenizer()
    num_embeddings = backend.get_vocab_size()
    backend.add_special_tokens(["<pad>"])
    tokenizer = load(tmp_path, backend, config_json={"vocab_size": num_embeddings})
    assert tokenizer.vocab_size == num_embeddings
    assert tokenizer.encode("ab", add_special_tokens=False)
    with pytest.raises(EngineError) as caught:
        tokenizer.encode("a <pad> b", add_special_tokens=False)
    assert caught.value.metadata["field"].startswith("prompt")
