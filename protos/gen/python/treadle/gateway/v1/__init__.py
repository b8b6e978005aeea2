"""Generated from protos/treadle/gateway/v1 by scripts/gen_protos.py. Do not edit."""
