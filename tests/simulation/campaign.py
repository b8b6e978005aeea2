"""Runs the simulation over a range of seeds outside pytest, and prints every seed that fails and how to replay it."""

import argparse
import sys
import time
import traceback

from tests.simulation.simulation import Simulation


def main() -> int:
    """Run the campaign; return 1 if any seed failed."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--max-failures", type=int, default=5, help="stop after this many failing seeds")
    arguments = parser.parse_args()

    started_s = time.perf_counter()
    num_steps = 0
    failed_seeds: list[int] = []
    seed = arguments.start
    while seed < arguments.start + arguments.seeds and len(failed_seeds) < arguments.max_failures:
        try:
            num_steps += Simulation(seed).run()
        except Exception:
            failed_seeds.append(seed)
            print(f"seed {seed} failed; replay: scripts/simulate --seeds 1 --start {seed}", flush=True)
            traceback.print_exc(file=sys.stdout)
        seed += 1
    elapsed_s = time.perf_counter() - started_s
    print(
        f"{seed - arguments.start} seeds, {num_steps} steps in {elapsed_s:.1f} s ({num_steps / elapsed_s:.0f}/s), "
        f"{len(failed_seeds)} failed{': ' if failed_seeds else ''}{' '.join(map(str, failed_seeds))}"
    )
    return 1 if failed_seeds else 0


if __name__ == "__main__":
    sys.exit(main())
