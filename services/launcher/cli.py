"""The `treadle` command: parses the command line and calls what does the work.

Exit statuses: 0 done, 1 failed, 2 wrong usage or setting, 3 no mesh there, 130 interrupted.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from services.common.errors import EngineError, ErrorReason
from services.common.version import treadle_version
from services.launcher.model_catalogue import CATALOGUE, DEFAULT_MODEL, find_catalogue_model
from services.launcher.model_store import ModelStore, default_store_root
from services.launcher.progress import ProgressBar
from services.launcher.settings import ServeSettings, add_serve_arguments, load_serve_command

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
_USAGE_REASONS: Final = (ErrorReason.INVALID_CONFIG, ErrorReason.MODEL_NOT_FOUND)
_DEFAULT_HTTP_PORT: Final = ServeSettings().http_port
_DEFAULT_DRAIN_WAIT_S: Final = 120.0
_MIB: Final = 1 << 20

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status.

    Args:
        argv: Arguments without the program; those of the process when not given.
    """
    # The default action would skip every clean-up of what was begun, such as stopping pip.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except EngineError as error:
        print(f"treadle: {error.message}", file=sys.stderr)
        return EXIT_USAGE if error.reason in _USAGE_REASONS else EXIT_FAILED
    except OSError as error:
        print(f"treadle: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("\ntreadle: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _exit_on_signal(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treadle", description="Serve large language models as a mesh of services.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run a mesh on this machine", allow_abbrev=False)
    add_serve_arguments(serve)
    serve.set_defaults(command=_serve)

    status = commands.add_parser("status", help="show the services of a running mesh")
    _add_port(status)
    status.add_argument("--json", action="store_true", help="print a JSON list")
    status.set_defaults(command=_status)

    explain = commands.add_parser("explain", help="show what happened to a request, and when")
    explain.add_argument("request_id", metavar="ID", help="id of the request, or of its answer")
    _add_port(explain)
    explain.add_argument("--host", default="127.0.0.1", help="where the mesh listens")
    explain.add_argument("--json", action="store_true", help="print the JSON of the HTTP interface")
    explain.set_defaults(command=_explain)

    _add_maintenance(commands)

    chat = commands.add_parser("chat", help="talk to a running mesh in the terminal")
    _add_port(chat)
    chat.add_argument("--host", default="127.0.0.1", help="where the mesh listens")
    chat.add_argument("--system", default=None, metavar="TEXT", help="system message")
    chat.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer, in tokens")
    chat.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy")
    chat.set_defaults(command=_chat)

    replay = commands.add_parser("replay", help="run a recorded plan log again and compare, or plan it differently")
    replay.add_argument("directory", type=Path, metavar="DIR", help="what `treadle serve --record` wrote")
    replay.add_argument("--model", default=None, metavar="TEXT", help="as for serve, when its files have moved")
    replay.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="simulate the recorded arrivals under this policy instead, and print latencies; may be given again",
    )
    replay.set_defaults(command=_replay)

    model = commands.add_parser("model", help="fetch models, or list them")
    actions = model.add_subparsers(required=True, metavar="ACTION")
    pull = actions.add_parser("pull", help="fetch a model into the cache, or verify it there")
    pull.add_argument("name", nargs="?", default=DEFAULT_MODEL)
    pull.set_defaults(command=_pull_model)
    actions.add_parser("list", help="show the known models").set_defaults(command=_list_models)

    commands.add_parser("version", help="print the version").set_defaults(command=_version)
    return parser


def _add_maintenance(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    worker = commands.add_parser("worker", help="look after a worker of a running mesh")
    worker_actions = worker.add_subparsers(required=True, metavar="ACTION")
    drain = worker_actions.add_parser("drain", help="restart a worker when what runs on it has ended")
    drain.add_argument("name", metavar="NAME", help="such as worker-0")
    _add_port(drain)
    drain.add_argument(
        "--timeout", type=float, default=_DEFAULT_DRAIN_WAIT_S, metavar="S", help="longest wait for the successor"
    )
    drain.set_defaults(command=_drain_worker)

    kv = commands.add_parser("kv", help="look after the KV cache of a running mesh")
    kv_actions = kv.add_subparsers(required=True, metavar="ACTION")
    fsck = kv_actions.add_parser("fsck", help="compare what KV-cache manager, scheduler and workers hold")
    _add_port(fsck)
    fsck.add_argument("--repair", action="store_true", help="take away what is certainly leaked")
    fsck.add_argument("--json", action="store_true", help="print a JSON object")
    fsck.set_defaults(command=_fsck)


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--http-port", type=int, default=_DEFAULT_HTTP_PORT, metavar="N", help="HTTP port of the mesh")


# The commands import what they need themselves: gRPC alone takes longer than `treadle version` does.


def _serve(arguments: argparse.Namespace) -> int:
    from services.launcher.serve import serve

    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    return serve(load_serve_command(given, os.environ), os.environ)


def _status(arguments: argparse.Namespace) -> int:
    from services.launcher.status import print_status

    return print_status(arguments.http_port, os.environ, as_json=arguments.json)


def _explain(arguments: argparse.Namespace) -> int:
    from services.launcher.explain import Question, explain

    question = Question(arguments.request_id, arguments.host, arguments.http_port)
    return explain(question, as_json=arguments.json)


def _drain_worker(arguments: argparse.Namespace) -> int:
    from services.launcher.worker_drain import drain_worker

    return drain_worker(arguments.name, arguments.http_port, os.environ, timeout_s=arguments.timeout)


def _fsck(arguments: argparse.Namespace) -> int:
    from services.launcher.fsck import fsck

    return fsck(arguments.http_port, os.environ, repairs=arguments.repair, as_json=arguments.json)


def _chat(arguments: argparse.Namespace) -> int:
    from services.launcher.chat import ChatSettings, chat

    return chat(
        ChatSettings(
            host=arguments.host,
            http_port=arguments.http_port,
            system=arguments.system,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
        )
    )


def _replay(arguments: argparse.Namespace) -> int:
    from services.launcher.replay import replay_arrivals, replay_plans

    if arguments.policy:
        return replay_arrivals(arguments.directory, arguments.policy)
    return replay_plans(arguments.directory, arguments.model, os.environ)


def _pull_model(arguments: argparse.Namespace) -> int:
    model = find_catalogue_model(arguments.name)
    if model is None:
        known = ", ".join(entry.name for entry in CATALOGUE)
        raise EngineError(ErrorReason.MODEL_NOT_FOUND, f"no model is named {arguments.name!r}; known: {known}")
    with ProgressBar() as progress:
        print(ModelStore(default_store_root(os.environ)).pull(model, progress))
    return 0


def _list_models(_arguments: argparse.Namespace) -> int:
    store = ModelStore(default_store_root(os.environ))
    for model in CATALOGUE:
        place = str(store.path_of(model)) if store.has(model) else "not fetched"
        print(f"{model.name}  {model.num_bytes / _MIB:.0f} MiB  {model.description}  [{place}]")
    return 0


def _version(_arguments: argparse.Namespace) -> int:
    print(f"treadle {treadle_version()}")
    return 0
