#!/usr/bin/env python3
"""Generate protos/gen/python from protos/treadle, or check that what is committed is up to date.

Usage: gen_protos.py [--check]

Run it with the oldest grpcio-tools that pyproject.toml allows: generated code refuses a runtime older than itself.
"""

import argparse
import filecmp
import importlib.resources
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
COMMITTED = PROTOS / "gen" / "python"
PACKAGE_DOC = '"""Generated from protos/{path} by scripts/gen_protos.py. Do not edit."""\n'


def generate(target: Path) -> None:
    """Write the Python modules and type stubs of every proto under ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "treadle").rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    third_party = PROTOS / "third_party"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{third_party}",
            f"-I{well_known}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *sources,
        ]
    )
    if status != 0:
        sys.exit(status)
    for folder in sorted({path.parent for path in (target / "treadle").rglob("*_pb2.py")} | {target / "treadle"}):
        for package in (folder, folder.parent):
            if package != target:
                relative = package.relative_to(target)
                (package / "__init__.py").write_text(PACKAGE_DOC.format(path=relative.as_posix()))
    for grpc_module in (target / "treadle").rglob("*_pb2_grpc.py"):
        # A module without services: protoc writes an empty stub file, which nobody imports.
        if "add_" not in grpc_module.read_text():
            grpc_module.unlink()


def differences(left: Path, right: Path) -> list[str]:
    """Name the files that differ or stand on one side only."""
    names = {
        str(path.relative_to(root)) for root in (left, right) for path in root.rglob("*.py*") if path.suffix != ".pyc"
    }
    return sorted(
        name
        for name in names
        if not (
            (left / name).exists() and (right / name).exists() and filecmp.cmp(left / name, right / name, shallow=False)
        )
    )


def main() -> int:
    """Generate, or compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when the committed code is not what protoc writes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "python"
        generate(fresh)
        stale = differences(fresh, COMMITTED)
        if arguments.check:
            for name in stale:
                print(f"protos/gen/python/{name} is not what scripts/gen_protos.py writes", file=sys.stderr)
            return 1 if stale else 0
        for name in stale:
            source, destination = fresh / name, COMMITTED / name
            if source.exists():
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(source.read_bytes())
            else:
                destination.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
