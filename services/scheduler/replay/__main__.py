"""``python -P -m services.scheduler.replay DIR check | run --worker ADDRESS | simulate --policy NAME``.

Exit statuses: 0 the same (or done), 1 something differs, 2 refused: the log is broken, or cannot be used so.
"""

import argparse
import asyncio
import sys
import typing
from pathlib import Path
from typing import Final

from services.common.errors import EngineError
from services.scheduler.core.policies import PolicyName
from services.scheduler.replay.arrivals import compare_policies
from services.scheduler.replay.plans import check_log, replay_on_worker

_EXIT_DIFFERS: Final = 1
_EXIT_REFUSED: Final = 2


def main() -> int:
    """Run one action; return its exit status."""
    arguments = _parser().parse_args()
    directory: Path = arguments.directory
    try:
        match arguments.action:
            case "check":
                _say(check_log(directory))
                return 0
            case "simulate":
                _say(compare_policies(directory, list(dict.fromkeys(arguments.policy))))
                return 0
            case _:
                is_same = asyncio.run(replay_on_worker(directory, arguments.worker, _say))
                return 0 if is_same else _EXIT_DIFFERS
    except EngineError as error:
        print(f"treadle: {error.message}", file=sys.stderr)  # noqa: T201 - the program's answer, not a log
        return _EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="services.scheduler.replay", allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="directory of the plan log")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("check", help="verify the log, and tell whether its plans can be run again")
    run = actions.add_parser("run", help="run the plans again and compare")
    run.add_argument("--worker", required=True, metavar="ADDRESS", help="gRPC target of a worker that nobody uses")
    simulate = actions.add_parser("simulate", help="plan the arrivals again under other policies")
    names = typing.get_args(PolicyName)
    simulate.add_argument("--policy", required=True, action="append", choices=names, help="once for each policy")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the program's answer, not a log


if __name__ == "__main__":
    sys.exit(main())
