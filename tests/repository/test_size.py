"""No file over 400 lines, no function over 60: what does not fit on a screen is split."""

import ast

from tests.repository.sources import python_sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {source.path: source.text.count("\n") for source in python_sources()}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    lengths = {
        f"{source.path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for source in python_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}
