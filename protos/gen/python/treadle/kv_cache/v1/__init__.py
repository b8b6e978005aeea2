"""Generated from protos/treadle/kv_cache/v1 by scripts/gen_protos.py. Do not edit."""
