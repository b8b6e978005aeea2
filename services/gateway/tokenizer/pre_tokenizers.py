"""How byte-level BPE families cut text into words before merging, by the name a GGUF file gives them.

The facts are those of each family's published ``tokenizer.json``; a GGUF file carries only the name
(``tokenizer.ggml.pre``). An unknown name is refused: a wrong cut gives other ids than the model was trained on, which
degrades answers without any error.
"""

from dataclasses import dataclass
from typing import Final

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from services.common.errors import EngineError, ErrorReason

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class BpeFamily:
    """What a family does beside its vocabulary and merges.

    Attributes:
        pattern: Regular expression whose matches are the words; None for GPT-2's own, which the library knows.
        splits_digits: Whether every digit is a word of its own before ``pattern`` is applied.
        normalizes_nfc: Whether text is put in Unicode normal form C first.
        ignores_merges: Whether a word that is in the vocabulary is taken whole without merging.
        adds_bos: Whether a text starts with BOS when the file does not say.
    """

    pattern: str | None = None
    splits_digits: bool = False
    normalizes_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self, *, add_prefix_space: bool) -> PreTokenizer:
        """Build the library's pre-tokenizer."""
        steps: list[PreTokenizer] = []
        if self.splits_digits:
            steps.append(Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(Split(Regex(self.pattern), behavior="isolated"))
        steps.append(ByteLevel(add_prefix_space=add_prefix_space, use_regex=self.pattern is None))
        return steps[0] if len(steps) == 1 else Sequence(steps)


_GPT2_FAMILY: Final = BpeFamily()
_DIGITS_FAMILY: Final = BpeFamily(splits_digits=True)
_LLAMA3_FAMILY: Final = BpeFamily(pattern=_LLAMA3, ignores_merges=True, adds_bos=True)
_QWEN2_FAMILY: Final = BpeFamily(pattern=_QWEN2, normalizes_nfc=True)
_TEKKEN_FAMILY: Final = BpeFamily(pattern=_TEKKEN, ignores_merges=True, adds_bos=True)

_FAMILY_BY_NAME: Final = {
    "default": _GPT2_FAMILY,
    "gpt-2": _GPT2_FAMILY,
    "gpt2": _GPT2_FAMILY,
    "smollm": _DIGITS_FAMILY,
    "starcoder": _DIGITS_FAMILY,
    "refact": _DIGITS_FAMILY,
    "codeshell": _DIGITS_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
    "tekken": _TEKKEN_FAMILY,
}


def bpe_family(name: str) -> BpeFamily:
    """Look up a family.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when the name is not known.
    """
    family = _FAMILY_BY_NAME.get(name)
    if family is None:
        known = ", ".join(sorted(_FAMILY_BY_NAME))
        raise EngineError(
            ErrorReason.MODEL_LOAD_FAILED,
            f"The GGUF file's pre-tokenizer {name!r} is not supported; supported are: {known}. "
            "Use the model's Hugging Face directory instead, whose tokenizer.json says it in full.",
            pre_tokenizer=name,
        )
    return family
