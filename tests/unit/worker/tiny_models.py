"""Tiny random-weight models of each family, through transformers, and our form of them."""

from dataclasses import dataclass

import torch
import transformers

from services.worker.model_config import ModelConfig, ModelFamily, RopeConfig
from services.worker.models import Decoder, build_model

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class TinyModel:
    """A reference model and ours with the same weights."""

    reference: torch.nn.Module
    config: ModelConfig
    model: Decoder

    @torch.inference_mode()
    def reference_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of the reference at every position, ``[len(token_ids), vocab_size]``."""
        return self.reference(torch.tensor([token_ids])).logits[0]


def tiny_model(
    family: ModelFamily,
    *,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 8,
    num_layers: int = 2,
    vocab_size: int = 97,
    sliding_window: int | None = None,
    tie_word_embeddings: bool = True,
    has_bias: bool = False,
    rope: RopeConfig | None = None,
    rope_parameters: dict[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> TinyModel:
    """Build both forms; weights are large enough that a wrong term shows in the logits."""
    config_class, model_class = _CLASSES[family]
    options: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tie_word_embeddings,
        "initializer_range": 0.3,
        "rope_parameters": rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
    }
    if family == "mistral":
        options["sliding_window"] = sliding_window
    if family == "llama":
        options |= {"attention_bias": has_bias, "mlp_bias": has_bias}
    reference = _random_reference(model_class(config_class(**options, attn_implementation="eager")))
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=40,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=rope or RopeConfig(theta=10000.0),
        max_model_len=256,
        tie_word_embeddings=tie_word_embeddings,
        has_qkv_bias=has_bias or family == "qwen2",
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        has_qk_norm=family == "qwen3",
        sliding_window=sliding_window,
    )
    weights = ((name.removeprefix("model."), tensor.clone()) for name, tensor in reference.state_dict().items())
    return TinyModel(reference, config, build_model(config, weights, dtype=dtype))


def _random_reference(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model the same random weights every time; norms and biases too, which are constant otherwise."""
    torch.manual_seed(7)
    model.float().eval().init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
