#!/usr/bin/env python3
"""Writes a GGUF file of a Llama model as a Hugging Face directory, for peers that read no GGUF.

The weights are those of the file, decoded to float32 and rounded to bfloat16, so every peer runs the same model; only
what it makes of the weights afterwards is its own. Run with Treadle's environment, whose loaders it uses.

Usage: export_model.py FILE.gguf DIRECTORY
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from services.worker.model_config import ModelConfig
from services.worker.weights import open_checkpoint
from services.worker.weights.tensors import stream_tensors


def config_fields(config: ModelConfig) -> dict[str, object]:
    """Return the content of ``config.json``.

    Raises:
        SystemExit: for anything but a plain Llama model.
    """
    is_plain = config.rope.scaling == "none" and config.rope.freq_factors is None and config.sliding_window is None
    if config.family != "llama" or not is_plain:
        raise SystemExit("only Llama models without rope scaling or sliding window are exported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.has_qkv_bias,
        "mlp_bias": config.has_mlp_bias,
        "eos_token_id": config.eos_token_ids[0],
        "bos_token_id": config.bos_token_id,
        "torch_dtype": "bfloat16",
    }


def export(source: Path, target: Path) -> None:
    """Write the directory; it appears under its name only when it is whole."""
    checkpoint = open_checkpoint(source)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config_fields(checkpoint.config), indent=2), encoding="utf-8")
    tensors = {
        name if name == "lm_head.weight" else f"model.{name}": tensor
        for name, tensor in stream_tensors(checkpoint, torch.bfloat16)
    }
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(str(partial))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description="Write a GGUF file as a Hugging Face directory.")
    parser.add_argument("source", type=Path, help="a GGUF file")
    parser.add_argument("target", type=Path, help="directory to write; replaced when there")
    arguments = parser.parse_args()
    export(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
