"""Generated from protos/treadle/common/v1 by scripts/gen_protos.py. Do not edit."""
