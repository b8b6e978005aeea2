"""Generated from protos/treadle/worker by scripts/gen_protos.py. Do not edit."""
