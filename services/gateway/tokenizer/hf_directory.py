"""Reads the tokenizer of a Hugging Face model directory.

``tokenizer.json`` holds the mapping; what surrounds it lies in several small files: the chat template in
``chat_template.jinja``, ``chat_template.json`` or ``tokenizer_config.json`` (in this order), the end tokens in
``generation_config.json`` and ``config.json``, the names of special tokens in ``tokenizer_config.json`` and
``special_tokens_map.json``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from services.common.errors import EngineError, ErrorReason
from services.gateway.tokenizer.pieces import SPACE_MARK, PieceAlphabet, PieceCoding
from services.gateway.tokenizer.surroundings import surround
from services.gateway.tokenizer.tokenizer import Tokenizer, TokenizerFacts

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")

_MAX_PLAUSIBLE_LENGTH: Final = 1 << 31
"""Configurations without a limit write 1e30."""


@dataclass(frozen=True, slots=True)
class _Directory:
    """A model directory whose small JSON files are read on demand; a missing one is empty."""

    path: Path

    def json_object(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            return {}
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.failure(f"{name} cannot be read ({error})") from error
        if not isinstance(value, dict):
            raise self.failure(f"{name} does not hold a JSON object")
        return value

    def failure(self, text: str) -> EngineError:
        return EngineError(ErrorReason.MODEL_LOAD_FAILED, f"{self.path}: {text}.", path=str(self.path))


def load_hf_tokenizer(path: Path) -> Tokenizer:
    """Read a model directory's tokenizer.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when ``tokenizer.json`` is missing, damaged or of an unsupported kind.
    """
    directory = _Directory(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise directory.failure("there is no tokenizer.json; save the tokenizer in the fast format")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise directory.failure(f"tokenizer.json cannot be read ({error})") from error
    config = directory.json_object("tokenizer_config.json")
    names = _special_token_texts(config, directory.json_object("special_tokens_map.json"))
    _apply_bos_and_eos_flags(backend, config, names)
    bos = names.get("bos_token")
    facts = TokenizerFacts(
        coding=_piece_coding(backend, directory),
        eos_token_ids=_eos_token_ids(directory, backend, names),
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        special_token_texts=names,
        chat_template=_chat_template(directory, config),
        model_max_length=_plausible_length(config.get("model_max_length")),
        num_embeddings=_plausible_length(directory.json_object("config.json").get("vocab_size")),
    )
    return Tokenizer(backend, facts)


def _special_token_texts(*sources: dict[str, Any]) -> dict[str, str]:
    """Collect named special tokens; each is a string or an object with its ``content``; earlier sources win."""
    texts: dict[str, str] = {}
    for source in sources:
        for name in _NAMED_TOKENS:
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                texts.setdefault(name, content)
    return texts


def _apply_bos_and_eos_flags(backend: Backend, config: dict[str, Any], names: dict[str, str]) -> None:
    """Let explicit ``add_bos_token``/``add_eos_token`` flags overrule the post-processor of ``tokenizer.json``.

    Without any flag the post-processor stands. This is what transformers does.
    """
    if "add_bos_token" in config or "add_eos_token" in config:
        surround(
            backend,
            bos=names.get("bos_token") if config.get("add_bos_token") else None,
            eos=names.get("eos_token") if config.get("add_eos_token") else None,
        )


def _eos_token_ids(directory: _Directory, backend: Backend, names: dict[str, str]) -> frozenset[int]:
    """Join the end tokens of all files: instruction-tuned models often list several in one of them only."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = directory.json_object(name).get("eos_token_id")
        candidates = value if isinstance(value, list) else [value]
        ids.update(i for i in candidates if isinstance(i, int) and not isinstance(i, bool))
    named = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return frozenset(ids if named is None else ids | {named})


def _chat_template(directory: _Directory, config: dict[str, Any]) -> str | None:
    file = directory.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = directory.json_object("chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several named ones; "default" is the one for plain chat
        by_name = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _piece_coding(backend: Backend, directory: _Directory) -> PieceCoding:
    """Tell from the decoder how pieces spell bytes.

    Raises:
        EngineError: MODEL_LOAD_FAILED, for a decoder that none of the served model families uses.
    """
    steps = [] if backend.decoder is None else _flatten(json.loads(backend.decoder.__getstate__()))
    by_type = {step["type"]: step for step in steps}
    if "ByteLevel" in by_type:
        return PieceCoding(PieceAlphabet.BYTE_LEVEL)
    metaspace = by_type.get("Metaspace")
    marks_spaces = any(
        step["type"] == "Replace" and step["pattern"] == {"String": SPACE_MARK} and step["content"] == " "
        for step in steps
    )
    if metaspace is None and not marks_spaces:
        raise directory.failure(
            f"tokenizer.json has the decoder {list(by_type) or None}; byte-level and SentencePiece ones are supported"
        )
    strips = "Strip" in by_type or (metaspace is not None and metaspace.get("prepend_scheme") != "never")
    return PieceCoding(
        PieceAlphabet.SENTENCEPIECE, has_byte_pieces="ByteFallback" in by_type, drops_leading_space=strips
    )


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """List the steps of a decoder, those of nested sequences in order."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _plausible_length(value: object) -> int | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return int(value) if 0 < value < _MAX_PLAUSIBLE_LENGTH else None
