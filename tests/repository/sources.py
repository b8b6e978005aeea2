"""The repository's Python files, parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("services", "kernels", "clients", "scripts", "tests")


@dataclass(frozen=True, slots=True)
class Source:
    """A file: its path from the root, its text, and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The name it is imported by, for files under services."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def python_sources() -> tuple[Source, ...]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(
        Source(str(path.relative_to(ROOT)), text := path.read_text(encoding="utf-8"), ast.parse(text)) for path in paths
    )


def sources_under(*prefixes: str) -> Iterator[Source]:
    return (source for source in python_sources() if source.path.startswith(prefixes))


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Every module that the file names in an import, with the names of ``from`` imports appended."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
