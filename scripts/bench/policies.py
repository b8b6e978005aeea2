#!/usr/bin/env python3
"""What each policy makes of a trace of arrivals, in virtual time; see tests/simulation/policy_latencies.py.

Example: scripts/bench/policies.py --trace azure_llm_conv.csv --requests 1500 --loads 0.5 1 2
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
runpy.run_module("tests.simulation.policy_latencies", run_name="__main__")
