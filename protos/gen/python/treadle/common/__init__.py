"""Generated from protos/treadle/common by scripts/gen_protos.py. Do not edit."""
