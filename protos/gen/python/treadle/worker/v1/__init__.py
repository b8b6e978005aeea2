"""Generated from protos/treadle/worker/v1 by scripts/gen_protos.py. Do not edit."""
