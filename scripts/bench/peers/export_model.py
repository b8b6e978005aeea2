#!/usr/bin/env python3
"""Writes a GGUF file as a Hugging Face directory in bfloat16, for peers that read no GGUF.

The weights are those of the file, decoded by ``transformers`` to float32 and rounded, so every peer runs the same
model; only what it makes of the weights afterwards is its own. Needs ``transformers``, ``gguf`` and ``torch``, which
Treadle's environment has; uses nothing of Treadle's own code.

Usage: export_model.py FILE.gguf DIRECTORY
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def export(source: Path, target: Path) -> None:
    """Write the directory; it appears under its name only when it is whole."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    folder, name = str(source.parent), source.name
    decoded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    # A model that came from a GGUF file refuses to be saved; one of its shape with its weights does not.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.load_state_dict(decoded.state_dict())
    model.save_pretrained(str(partial))
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(str(partial))
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
