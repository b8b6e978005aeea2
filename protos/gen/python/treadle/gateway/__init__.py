"""Generated from protos/treadle/gateway by scripts/gen_protos.py. Do not edit."""
