"""Streams end with their scope, tasks have an owner: rules of services/STYLE.md that a syntax tree shows."""

import ast

import pytest

from tests.repository.sources import sources_under

STREAMS = "services/common/rpc/streams.py"


def _is_stub_call(node: ast.expr) -> bool:
    """Whether the expression calls a method of something that is named a stub, or makes a stub and calls it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    if isinstance(owner, ast.Call):
        owner = owner.func
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name.lower().endswith("stub")


def _opens_stream(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open_stream"


def _calls_bound_in(tree: ast.AST) -> set[str]:
    """Names that hold a streaming call, by assignment or by ``async with open_stream(...) as name``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_stub_call(node.value):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                if _opens_stream(item.context_expr) and isinstance(item.optional_vars, ast.Name):
                    names.add(item.optional_vars.id)
    return names


def bare_loops(tree: ast.Module) -> list[int]:
    """Lines with an ``async for`` straight over a streaming call."""
    calls = _calls_bound_in(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFor)
        if _is_stub_call(node.iter) or (isinstance(node.iter, ast.Name) and node.iter.id in calls)
    ]


def unowned_tasks(tree: ast.Module) -> list[int]:
    """Lines that start a task on the loop itself, which nobody then waits for."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create_task"
        if "loop" in ast.unparse(node.func.value).lower()
    ]


def test_no_loop_runs_over_a_bare_call() -> None:
    # Leaving such a loop does not cancel the call.
    found = {source.path: lines for source in sources_under("services/") if (lines := bare_loops(source.tree))}
    found.pop(STREAMS, None)
    assert found == {}


def test_no_task_is_started_without_an_owner() -> None:
    assert {s.path: lines for s in sources_under("services/") if (lines := unowned_tasks(s.tree))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "async for m in self._stub.Watch(r): pass",
        "async for m in health_pb2_grpc.HealthStub(channel).Watch(r): pass",
        "call = stub.Watch(r)\nasync for m in call: pass",
        "async with open_stream(lambda: s.Watch(r)) as call:\n    async for m in call: pass",
    ],
)
def test_rule_sees_a_bare_loop(text: str) -> None:
    assert bare_loops(ast.parse(f"async def f():\n    {text.replace(chr(10), chr(10) + '    ')}")) != []


def test_rule_allows_reading_through_read_messages() -> None:
    text = "async def f():\n async with open_stream(s) as call:\n  async for m in read_messages(call, r): pass"
    assert bare_loops(ast.parse(text)) == []
