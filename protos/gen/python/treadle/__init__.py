"""Generated from protos/treadle by scripts/gen_protos.py. Do not edit."""
