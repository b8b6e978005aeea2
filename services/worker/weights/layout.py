"""The tensors that a model of a given configuration consists of: their names and shapes.

Guarantees: one list for both file formats and for the memory plan, so that what is planned, checked and streamed is the
same. Names are Hugging Face's without the ``model.`` prefix; shapes are torch's, ``[out_features, in_features]``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from services.worker.model_config import ModelConfig
from services.worker.weights.refusal import listed, refusal

Shape = tuple[int, ...]

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """List every tensor of the model, in the order in which it is used."""
    shape_by_name: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shape_by_name.update((f"layers.{layer}.{name}", shape) for name, shape in layer_tensors(config))
    shape_by_name[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shape_by_name[HEAD] = (config.vocab_size, config.hidden_size)
    return shape_by_name


def layer_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """List the tensors of one decoder layer, named relative to the layer."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield from _linear("self_attn.q_proj", q_width, hidden, has_bias=config.has_qkv_bias)
    yield from _linear("self_attn.k_proj", kv_width, hidden, has_bias=config.has_qkv_bias)
    yield from _linear("self_attn.v_proj", kv_width, hidden, has_bias=config.has_qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, q_width, has_bias=config.has_output_bias)
    if config.has_qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _linear("mlp.gate_proj", intermediate, hidden, has_bias=config.has_mlp_bias)
    yield from _linear("mlp.up_proj", intermediate, hidden, has_bias=config.has_mlp_bias)
    yield from _linear("mlp.down_proj", hidden, intermediate, has_bias=config.has_mlp_bias)


def check_layout(path: Path, config: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Compare the tensors that a file declares with those that its configuration implies.

    Raises:
        EngineError: MODEL_LOAD_FAILED, naming the tensors that are missing, surplus or of another shape.
    """
    # Each layer has several tensors. A damaged count of billions must not be written out as a list first.
    if config.num_layers > len(found):
        raise refusal(path, f"the model should have {config.num_layers} layers, but holds only {len(found)} tensors")
    expected = expected_tensors(config)
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"lacks the tensors {listed(missing)}")
    if surplus := [name for name in found if name not in expected]:
        problems.append(f"holds tensors that a {config.family} model does not have: {listed(surplus)}")
    misshapen = [
        f"{name} (is {list(found[name])}, should be {list(shape)})"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if misshapen:
        problems.append(f"holds tensors of the wrong shape: {listed(misshapen)}")
    if problems:
        raise refusal(path, "the model " + "; it ".join(problems))


def _linear(name: str, num_out: int, num_in: int, *, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (num_out, num_in)
    if has_bias:
        yield f"{name}.bias", (num_out,)
