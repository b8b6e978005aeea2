"""Generated from protos/treadle/kv_cache by scripts/gen_protos.py. Do not edit."""
