#!/usr/bin/env python3
"""What a step costs the scheduler's core; see tests/simulation/scheduler_cost.py, which measures it in this process.

Example: scripts/bench/scheduler.py --requests 1 1024 --contexts 128 32768
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
runpy.run_module("tests.simulation.scheduler_cost", run_name="__main__")
