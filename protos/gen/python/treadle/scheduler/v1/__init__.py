"""Generated from protos/treadle/scheduler/v1 by scripts/gen_protos.py. Do not edit."""
