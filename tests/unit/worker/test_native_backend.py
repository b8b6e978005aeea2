"""Which backend runs a model, what loading refuses, and that the native one starts without torch."""

import os
import struct
import subprocess
import sys

import pytest

from services.common.errors import EngineError, ErrorReason
from services.worker.config import WorkerConfig
from services.worker.drafting import DraftSettings
from services.worker.loading import why_not_native
from services.worker.model_runner import ModelRunner
from services.worker.native.loading import draft_settings
from services.worker.native.runner import NativeRunner
from services.worker.weights import open_checkpoint
from tests.unit.worker.native_models import load, write_model

_START = """
import sys
from services.common.clock import SystemClock
from services.worker.config import WorkerConfig
from services.worker.loading import load_model
from services.worker.service import WorkerService
loaded = load_model(WorkerConfig(listen="unix:/unused", model=sys.argv[1], kv_cache_gib=0.001), SystemClock())
heavy = {"torch", "transformers", "gguf", "safetensors", "tokenizers"} & sys.modules.keys()
print(type(loaded.runner).__name__, sorted(heavy))
"""


def test_native_worker_imports_neither_torch_nor_a_model_library(tmp_path):
    path = write_model(tmp_path, type_name="Q8_0")
    started = subprocess.run(
        [sys.executable, "-P", "-c", _START, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert started.stdout.strip() == "NativeRunner []"


def write_iq4_nl(directory):
    """A file with one matrix in a format that only torch runs; its blocks have the size of Q4_0's."""
    path = write_model(directory, type_name="Q4_0")
    content, name = bytearray(path.read_bytes()), b"blk.0.ffn_gate.weight"
    type_offset = content.index(name) + len(name) + 4 + 2 * 8
    content[type_offset : type_offset + 4] = struct.pack("<I", 20)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("backend", "runner_class"), [("auto", NativeRunner), ("native", NativeRunner), ("torch", ModelRunner)]
)
def test_model_runs_on_the_backend_that_is_asked_for(tmp_path, backend, runner_class):
    assert type(load(write_model(tmp_path), backend=backend).runner) is runner_class


def test_auto_takes_torch_for_formats_that_the_engine_does_not_know_and_says_so(tmp_path, caplog):
    path = write_iq4_nl(tmp_path)
    with caplog.at_level("INFO"):
        assert type(load(path, backend="auto").runner) is ModelRunner
    assert "torch computes: the engine has no code for weights in IQ4_NL" in caplog.text


def test_native_refuses_what_it_cannot_run_with_the_reason(tmp_path):
    with pytest.raises(EngineError, match="backend is native, but the engine has no code for weights in IQ4_NL") as e:
        load(write_iq4_nl(tmp_path), backend="native")
    assert e.value.reason is ErrorReason.INVALID_CONFIG


def test_native_needs_blocks_of_whole_lanes(tmp_path):
    config = WorkerConfig(listen="unix:/unused", model="m", block_size=8)
    assert why_not_native(config, open_checkpoint(write_model(tmp_path))) == (
        "block_size is 8, and the engine needs a multiple of 16"
    )


def test_native_is_passed_over_where_the_library_was_not_built(tmp_path, monkeypatch):
    monkeypatch.setattr("treadle_kernels.cpu.unavailable_reason", lambda: "there is no compiler")
    config = WorkerConfig(listen="unix:/unused", model="m")
    assert why_not_native(config, open_checkpoint(write_model(tmp_path))) == "there is no compiler"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"backend": "torch", "quantization": "int8"}, "quantization int8 needs the native backend"),
        ({"backend": "torch", "activation_bits": 8}, "activation_bits 8 needs the native backend"),
        ({"backend": "torch", "activations": "int8"}, "activations int8 needs the native backend"),
        ({"backend": "torch", "speculation": "ngram"}, "speculation ngram needs the native backend"),
        ({"speculation_tokens": 0}, "must be in 1..32"),
        ({"speculation_min_ngram": 5}, "must be at least 1 and at most speculation_max_ngram"),
        ({"backend": "torch", "kv_dtype": "int8"}, "kv_dtype int8 with dtype bfloat16 needs the native backend"),
        ({"dtype": "float32", "quantization": "int4"}, "dtype float32 asks for weights without any"),
        ({"max_model_len": 513}, "max_model_len is 513, but the model was made for 512"),
        ({"max_model_len": 401}, "the KV cache holds 400 tokens; raise kv_cache_gib"),
        ({"kv_cache_gib": 1e-6}, "hold 0 blocks of"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, options, problem):
    path = write_model(tmp_path)
    with pytest.raises(EngineError, match=problem) as refused:
        load(path, **{"kv_cache_gib": 0.0001, "dtype": "bfloat16", **options})
    assert refused.value.reason is ErrorReason.INVALID_CONFIG


def test_model_that_does_not_fit_is_refused_before_it_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr("services.worker.native.loading.available_bytes", lambda: 1 << 20)
    path = write_model(tmp_path)
    with pytest.raises(EngineError, match="the model does not fit") as refused:
        load(path, kv_cache_gib=1)
    assert refused.value.reason is ErrorReason.MODEL_LOAD_FAILED
    assert not list(path.glob("*.packed"))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bytes_per_number"),
    [
        ("bfloat16", "auto", 2),
        ("float32", "auto", 4),
        ("bfloat16", "float32", 4),
        ("float32", "bfloat16", 2),
        # One byte, and a float32 scale for every 16 numbers.
        ("bfloat16", "int8", 1.25),
    ],
)
def test_kv_cache_has_the_format_that_is_asked_for(tmp_path, dtype, kv_dtype, bytes_per_number):
    loaded = load(write_model(tmp_path), dtype=dtype, kv_dtype=kv_dtype)
    # 2 layers x 2 (key, value) x 2 heads x 16 numbers x 16 slots.
    assert loaded.runner._cache.shape.bytes_per_block() == 2048 * bytes_per_number


def test_loaded_model_tells_how_its_weights_run(tmp_path):
    quantised, plain = write_model(tmp_path / "a", type_name="Q8_0"), write_model(tmp_path / "b")
    version = open_checkpoint(plain).weight_version
    int8 = {"activations": "int8"}
    facts = [
        load(quantised, **int8),
        load(plain, **int8),
        load(plain, dtype="float32"),
        load(plain, quantization="int8", **int8),
        load(plain, quantization="int4", **int8),
    ]
    assert [loaded.dtype for loaded in facts] == ["q8_0", "f32", "f32", "q8_0", "q4_1"]
    # Converted weights give other tokens, so they are other weights to prefix caches and replays.
    versions = [loaded.weight_version.removeprefix(version) for loaded in facts[1:]]
    assert versions == ["-int8x2", "-float32", "-int8-int8x2", "-int4-int8x2"]


def test_weights_that_are_computed_in_another_way_are_another_version(tmp_path):
    """They give other tokens, and a replay that computed otherwise would differ from its log without a reason."""
    path = write_model(tmp_path, type_name="Q8_0")
    settings = [
        {"activations": "int8"},
        {"activations": "int8", "activation_bits": 8},
        {"activations": "int8", "kv_dtype": "int8"},
        {"activations": "int8", "kv_dtype": "float32"},
        {"activations": "bfloat16"},
        {"activations": "bfloat16", "activation_bits": 32},
        {"activations": "rotated", "activation_bits": 8},
        {"backend": "torch"},
        {"backend": "torch", "dtype": "float32"},
    ]
    versions = [load(path, **setting).weight_version for setting in settings]
    digest = open_checkpoint(path).weight_version
    assert [version.removeprefix(digest) for version in versions] == [
        "-int8x2",
        "-int8x1",
        "-int8x2-kv_int8",
        "-int8x2-kv_float32",
        "-bf16",
        "-splitx2",
        "-rotated",
        "-torch_bfloat16",
        "-torch_float32",
    ]


def test_worker_tells_how_many_tokens_it_guesses_and_none_by_default(tmp_path):
    path = write_model(tmp_path)
    assert load(path).max_draft_tokens == 0
    assert load(path, speculation="ngram", speculation_tokens=3).max_draft_tokens == 3


def test_loaded_model_guesses_by_the_configured_lengths(tmp_path):
    config = WorkerConfig(listen="unix:/unused", model="m", speculation="ngram", speculation_max_ngram=6)
    assert draft_settings(config) == DraftSettings(max_draft_tokens=4, min_ngram=2, max_ngram=6)
