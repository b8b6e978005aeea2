"""The default model in float32: ours, and the outputs of transformers on the same dequantised weights."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from services.worker.kv_storage import KVStorage
from services.worker.model_config import ModelConfig
from services.worker.model_runner import ModelRunner
from services.worker.models import Decoder, build_model
from services.worker.weights import open_checkpoint
from services.worker.weights.tensors import stream_tensors

NUM_OUTPUTS = 64
BLOCK_SIZE = 32
NUM_BLOCKS = 400
REFERENCE_BATCH = 10


@dataclass(frozen=True)
class Identity:
    """What an identity test compares.

    Attributes:
        model: Ours.
        prompts: 20 varied prompts as token ids.
        expected: The reference's 64 tokens after each.
        leads: Per prompt and token, by how much the reference's best logit led; a tie is no difference.
    """

    model: Decoder
    prompts: list[list[int]]
    expected: list[list[int]]
    leads: list[list[float]]

    def make_runner(self) -> ModelRunner:
        kv = KVStorage(
            self.model.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, is_poisoned=True
        )
        return ModelRunner(self.model, kv, max_num_batched_tokens=1024)


def varied_prompts(vocab_size: int) -> list[list[int]]:
    """Lengths from 1 to 90, some with repeats, some with a common beginning; the same on every machine."""
    generator = torch.Generator().manual_seed(20)
    lengths = [1, 2, 5, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 90]
    prompts = [torch.randint(100, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    for index in (3, 9, 15):  # repeated phrases, which the model continues
        prompts[index] = (prompts[index][:4] * 20)[: lengths[index]]
    for index in (12, 17, 19):  # a full block in common
        prompts[index][:33] = prompts[10][:33]
    return prompts


@pytest.fixture(scope="session")
def identity(model_path: Path) -> Identity:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(model_path)
    weights = dict(stream_tensors(checkpoint, torch.float32))
    reference = reference_model(checkpoint.config, weights)
    prompts = varied_prompts(checkpoint.config.vocab_size)
    expected, leads = reference_outputs(reference, prompts)
    return Identity(build_model(checkpoint.config, weights.items(), dtype=torch.float32), prompts, expected, leads)


def reference_model(config: ModelConfig, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Build transformers' Llama around the weights, sharing their memory."""
    options = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_model_len,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(options)
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    named["lm_head.weight"] = weights["embed_tokens.weight"]
    reference.load_state_dict(named, assign=True, strict=True)
    # The frequencies are no weights: the meta device left them empty.
    reference.model.rotary_emb = type(reference.model.rotary_emb)(options)
    return reference.eval()


def reference_outputs(
    reference: torch.nn.Module, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Run ``generate`` on neighbouring lengths together, padded on the left and masked: a fraction of the time."""
    outputs, leads = [], []
    for first in range(0, len(prompts), REFERENCE_BATCH):
        group = prompts[first : first + REFERENCE_BATCH]
        longest = max(map(len, group))
        padding = [longest - len(prompt) for prompt in group]
        generated = reference.generate(
            torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, group, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=NUM_OUTPUTS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
        outputs += generated.sequences[:, longest:].tolist()
        best_two = torch.stack(generated.logits, dim=1).topk(2).values
        leads += (best_two[..., 0] - best_two[..., 1]).tolist()
    return outputs, leads
