#!/usr/bin/env python3
"""How far the number formats of the native engine move a model's answers from the float32 reference.

Perplexity, mean divergence (KL, nats a token) and agreement of the likeliest token over a bundled text, then greedy
answers to 20 prompts cut from it. The text is 8,174 tokens of English prose, all long in the public domain: in
``data/openings.txt`` the openings of Pride and Prejudice (Austen, 1813), A Tale of Two Cities (Dickens, 1859),
Moby-Dick (Melville, 1851) and Frankenstein (Shelley, 1818); in ``data/passages.txt`` passages of Alice's Adventures in
Wonderland (Carroll, 1865), The Tell-Tale Heart (Poe, 1843), The Gift of the Magi (O. Henry, 1905), the Declaration of
Independence (1776), A Scandal in Bohemia (Doyle, 1891), The Time Machine (Wells, 1895), Walden (Thoreau, 1854), the
Adventures of Huckleberry Finn (Twain, 1884) and the Gettysburg Address (Lincoln, 1863). Quotation marks are plain. The
reference is the torch model in float32 on the same, decoded weights.

A difference of perplexity is told with its standard error: that of the mean difference of the two models' losses, token
by token, over the square root of the tokens. Below two of them it may be chance. *Off grid* are equivalent weights that
no longer lie on the grid of the stored format (``equivalent_weights.py``): what quantising trained weights costs.
*transformers, bfloat16* is that library on the decoded weights in bfloat16, as models are commonly run.

Usage: quality.py MODEL [--window 512]
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from scripts.equivalent_weights import decode_checkpoint
from services.gateway.tokenizer.loading import load_tokenizer
from services.worker.attention import AttentionMetadata
from services.worker.config import WorkerConfig
from services.worker.kv_storage import KVStorage
from services.worker.model_config import ModelConfig
from services.worker.model_runner import ModelRunner
from services.worker.models import Decoder, build_model
from services.worker.native.loading import build_native_model, kv_shape_of, pack_model, recipe_for
from services.worker.native.packed_file import open_or_pack
from services.worker.native.runner import NativeRunner
from services.worker.plan import BatchPlan, BlockId, Handle, NewRequest, SamplingParams, ScheduledRow, StepResult
from services.worker.weights import Checkpoint, open_checkpoint
from services.worker.weights.tensors import stream_tensors
from treadle_kernels.cpu import SAMPLING_DTYPE, CpuModel, KvCache, StepRows
from treadle_kernels.paged_attention import PagedBatch
from treadle_kernels.paged_attention.batch import PagedRow

TEXTS = tuple(Path(__file__).with_name("data") / name for name in ("openings.txt", "passages.txt"))
BLOCK_SIZE = 32
NUM_PROMPTS, PROMPT_LEN, NUM_OUTPUTS = 20, 24, 32
NUM_BLOCKS = 1 + NUM_PROMPTS * (-(-(PROMPT_LEN + NUM_OUTPUTS) // BLOCK_SIZE))

Floats = npt.NDArray[np.float32]
Execute = Callable[[BatchPlan], StepResult]


class Source(Enum):
    """Weights: as stored, decoded to float32, decoded and taken off the grid of their format; or another library's."""

    STORED = "stored"
    DECODED = "decoded"
    OFF_GRID = "off grid"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the model: settings of the worker, and which weights it starts from."""

    name: str
    settings: dict[str, Any]
    source: Source = Source.STORED


VARIANTS = (
    Variant("as stored", {}),
    Variant("as stored, KV float32", {"kv_dtype": "float32"}),
    Variant("as stored, activations 32 bits", {"activation_bits": 32}),
    Variant("as stored, activations 32 bits, KV float32", {"activation_bits": 32, "kv_dtype": "float32"}),
    Variant("as stored, KV int8", {"kv_dtype": "int8"}),
    Variant("as stored, activations 8 bits", {"activation_bits": 8}),
    Variant("as stored, activations 8 bits, KV int8", {"activation_bits": 8, "kv_dtype": "int8"}),
    Variant("decoded, int8", {"quantization": "int8"}, Source.DECODED),
    Variant("decoded, int4", {"quantization": "int4"}, Source.DECODED),
    Variant("off grid, bfloat16", {}, Source.OFF_GRID),
    Variant("off grid, int8", {"quantization": "int8"}, Source.OFF_GRID),
    Variant("off grid, int4", {"quantization": "int4"}, Source.OFF_GRID),
    Variant("float32", {"dtype": "float32"}),
    Variant("transformers, bfloat16", {}, Source.TRANSFORMERS),
)


@dataclass(frozen=True, slots=True)
class Quality:
    """A variant beside the reference.

    Attributes:
        perplexity: Of the text.
        perplexity_ratio: To the reference's.
        ratio_error: Standard error of that ratio.
        divergence: Mean KL divergence from the reference, nats a token.
        agreement: Share of positions with the same likeliest token.
    """

    perplexity: float
    perplexity_ratio: float
    ratio_error: float
    divergence: float
    agreement: float


def windows(model: Path, length: int) -> list[list[int]]:
    """Cut the texts' tokens into runs of at most ``length``."""
    text = "\n\n".join(path.read_text(encoding="utf-8").strip() for path in TEXTS)
    tokens = load_tokenizer(model).encode(text, add_special_tokens=False)
    return [list(tokens[start : start + length]) for start in range(0, len(tokens), length)]


class ReferenceModel:
    """The float32 torch model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model: Decoder = build_model(
            checkpoint.config, stream_tensors(checkpoint, torch.float32), dtype=torch.float32
        )

    def log_probabilities(self, token_ids: Sequence[int]) -> Floats:
        """Return ``[len(token_ids), vocab_size]``."""
        config, length = self._model.config, len(token_ids)
        blocks = [BlockId(block) for block in range(1, length // BLOCK_SIZE + 2)]
        kv = _kv_storage(config, len(blocks) + 1)
        batch = PagedBatch((PagedRow(length, length, blocks),), BLOCK_SIZE, torch.float32, config.sliding_window)
        positions = torch.arange(length)
        metadata = AttentionMetadata(positions + BLOCK_SIZE, batch)
        hidden = self._model.forward(torch.tensor(token_ids), positions, kv.layers, metadata)
        return _log_softmax(self._model.compute_logits(hidden).numpy())

    def runner(self) -> ModelRunner:
        """Make a runner with room for the prompts."""
        kv = _kv_storage(self._model.config, NUM_BLOCKS)
        return ModelRunner(self._model, kv, max_num_batched_tokens=NUM_PROMPTS * PROMPT_LEN)


class NativeModel:
    """A model on the native engine, its weights packed in memory."""

    def __init__(self, checkpoint: Checkpoint, settings: dict[str, Any], *, max_num_tokens: int) -> None:
        config = WorkerConfig(
            listen="none",
            model="none",
            max_num_batched_tokens=max(max_num_tokens, NUM_PROMPTS * PROMPT_LEN),
            **settings,
        )
        recipe = recipe_for(config, checkpoint)
        packed = open_or_pack((), recipe, lambda out: pack_model(config, checkpoint, recipe, out))
        self._max_positions = max(max_num_tokens, PROMPT_LEN + NUM_OUTPUTS)
        self._model: CpuModel = build_native_model(
            config, checkpoint, recipe, packed, max_positions=self._max_positions
        )
        self._kv_shape = kv_shape_of(config, checkpoint)

    def log_probabilities(self, token_ids: Sequence[int]) -> Floats:
        """Return ``[len(token_ids), vocab_size]``."""
        length = len(token_ids)
        num_blocks = length // BLOCK_SIZE + 1
        rows = StepRows(
            _int32s([0, length]), _int32s([length]), _int32s(range(1, num_blocks + 1)), _int32s([0, num_blocks])
        )
        sampling = np.zeros(length, dtype=SAMPLING_DTYPE)
        sampling["token_index"], sampling["top_p"] = np.arange(length), 1.0
        logits = np.empty((length, self._model.shape.vocab_size), dtype=np.float32)
        self._model.step(KvCache(self._kv_shape, num_blocks + 1), rows, _int32s(token_ids), sampling, logits)
        return _log_softmax(logits)

    def runner(self) -> NativeRunner:
        """Make a runner with room for the prompts."""
        return NativeRunner(self._model, KvCache(self._kv_shape, NUM_BLOCKS), max_positions=self._max_positions)


class TransformersModel:
    """The model in bfloat16 as transformers runs it."""

    def __init__(self, path: Path) -> None:
        place, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        self._model = AutoModelForCausalLM.from_pretrained(str(place), dtype=torch.bfloat16, **options)

    def log_probabilities(self, token_ids: Sequence[int]) -> Floats:
        """Return ``[len(token_ids), vocab_size]``."""
        with torch.no_grad():
            return _log_softmax(self._model(torch.tensor([list(token_ids)])).logits[0].float().numpy())

    def greedy_answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Answer prompts one by one, greedily, `NUM_OUTPUTS` tokens each."""
        length = {"max_new_tokens": NUM_OUTPUTS, "min_new_tokens": NUM_OUTPUTS}
        answers = (self._model.generate(torch.tensor([list(p)]), do_sample=False, **length) for p in prompts)
        return [answer[0, len(prompt) :].tolist() for answer, prompt in zip(answers, prompts, strict=True)]


class Scorer(Protocol):
    """A model that tells how likely tokens are."""

    def log_probabilities(self, token_ids: Sequence[int]) -> Floats:
        """Return ``[len(token_ids), vocab_size]``."""
        ...


def compare(texts: Sequence[Sequence[int]], reference: Sequence[Floats], model: Scorer) -> Quality:
    """Measure a variant on some texts, of which the reference's log probabilities are given."""
    losses, expected_losses, divergences, agreements = [], [], [], []
    for token_ids, expected in zip(texts, reference, strict=True):
        found = model.log_probabilities(token_ids)
        following = np.array(token_ids[1:])
        places = np.arange(len(following))
        losses.append(-found[places, following])
        expected_losses.append(-expected[places, following])
        divergences.append((np.exp(expected) * (expected - found)).sum(axis=1, dtype=np.float64))
        agreements.append(expected.argmax(axis=1) == found.argmax(axis=1))
    loss, expected_loss = (np.concatenate(parts).astype(np.float64) for parts in (losses, expected_losses))
    differences = loss - expected_loss
    ratio = float(np.exp(differences.mean()))
    return Quality(
        perplexity=float(np.exp(loss.mean())),
        perplexity_ratio=ratio,
        ratio_error=ratio * float(differences.std(ddof=1)) / len(differences) ** 0.5,
        divergence=float(np.concatenate(divergences).mean()),
        agreement=float(np.concatenate(agreements).mean()),
    )


def greedy_answers(execute: Execute, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Answer prompts together, greedily, `NUM_OUTPUTS` tokens each."""
    blocks_each = (NUM_BLOCKS - 1) // NUM_PROMPTS
    requests = tuple(
        NewRequest(
            handle=Handle(index + 1),
            request_id=str(index),
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0),
            block_ids=tuple(BlockId(1 + index * blocks_each + block) for block in range(blocks_each)),
        )
        for index, prompt in enumerate(prompts)
    )
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(NUM_OUTPUTS):
        rows = tuple(
            ScheduledRow(request.handle, 1 if step else len(request.token_ids), (), is_sampling=True)
            for request in requests
        )
        for token in execute(BatchPlan(step + 1, () if step else requests, rows)).sampled:
            answers[token.handle - 1].append(token.token_id)
    return answers


def common_lengths(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[int]:
    """Tokens before the first that differs, for each answer."""
    return [
        next((place for place, (a, b) in enumerate(zip(answer, other, strict=True)) if a != b), len(answer))
        for answer, other in zip(answers, expected, strict=True)
    ]


def main() -> None:
    """Measure all variants and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--window", type=int, default=512, help="tokens that a text has; default 512")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument(
        "--variants", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}; default all"
    )
    arguments = parser.parse_args()
    checkpoint, texts = open_checkpoint(arguments.model), windows(arguments.model, arguments.window)
    reference_model = ReferenceModel(checkpoint)
    reference = [reference_model.log_probabilities(text) for text in texts]
    prompts = list(_prompts(texts))
    expected = greedy_answers(reference_model.runner().execute, prompts)
    del reference_model
    print(f"{checkpoint.name}: {sum(map(len, texts))} tokens in {len(texts)} windows of {arguments.window}")
    print("| variant | perplexity | to reference | KL, nats a token | same likeliest | same 32 tokens | mean common |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        source_by_kind: dict[Source, Checkpoint] = {
            Source.STORED: checkpoint,
            Source.DECODED: decode_checkpoint(checkpoint, Path(directory)),
            Source.OFF_GRID: decode_checkpoint(checkpoint, Path(directory), is_off_grid=True),
        }
        for variant in VARIANTS:
            if arguments.variants and variant.name not in arguments.variants:
                continue
            if variant.source is Source.TRANSFORMERS:
                other = TransformersModel(arguments.model)
                q, answers = compare(texts, reference, other), other.greedy_answers(prompts)
            else:
                model = NativeModel(source_by_kind[variant.source], variant.settings, max_num_tokens=arguments.window)
                q, answers = compare(texts, reference, model), greedy_answers(model.runner().execute, prompts)
            common = common_lengths(answers, expected)
            print(
                f"| {variant.name} | {q.perplexity:.3f} "
                f"| {100 * (q.perplexity_ratio - 1):+.2f} % ± {100 * q.ratio_error:.2f} % | {q.divergence:.5f} "
                f"| {100 * q.agreement:.1f} % | {common.count(NUM_OUTPUTS)} of {len(common)} | {np.mean(common):.1f} |",
                flush=True,
            )


def _prompts(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    tokens = [token for text in texts for token in text]
    for index in range(NUM_PROMPTS):
        start = (len(tokens) - PROMPT_LEN) * index // (NUM_PROMPTS - 1)
        yield tokens[start : start + PROMPT_LEN]


def _kv_storage(config: ModelConfig, num_blocks: int) -> KVStorage:
    return KVStorage(config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32)


def _int32s(values: Sequence[int] | range) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: Floats = shifted - np.log(total).astype(np.float32)
    return result


if __name__ == "__main__":
    main()
