"""Generated from protos/treadle/scheduler by scripts/gen_protos.py. Do not edit."""
