"""The structures of ``native/treadle_cpu.h`` for ctypes, field by field in the same order."""

import ctypes

ABI = 4
NUM_PHASES = 10


class LinearStruct(ctypes.Structure):
    """``treadle_linear``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("bias", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
    )


class KvStruct(ctypes.Structure):
    """``treadle_kv``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    )


class RowsStruct(ctypes.Structure):
    """``treadle_rows``."""

    _fields_ = (
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
        ("block_starts", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
    )


class LayerStruct(ctypes.Structure):
    """``treadle_layer``."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("query", LinearStruct),
        ("key", LinearStruct),
        ("value", LinearStruct),
        ("output", LinearStruct),
        ("gate", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
    )


class ModelStruct(ctypes.Structure):
    """``treadle_model_desc``."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("final_norm", ctypes.c_void_p),
        ("rope_cos", ctypes.c_void_p),
        ("rope_sin", ctypes.c_void_p),
        ("embedding", LinearStruct),
        ("head", LinearStruct),
        ("num_layers", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("max_positions", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("rms_norm_eps", ctypes.c_float),
        ("max_num_tokens", ctypes.c_int32),
        ("max_num_sampled", ctypes.c_int32),
        ("activations", ctypes.c_int32),
        ("activation_terms", ctypes.c_int32),
    )
