"""Each package says what it exports, and exports what it says."""

import ast

import pytest

from tests.repository.sources import Source, sources_under

PACKAGES = [
    source
    for source in sources_under("services/", "kernels/", "clients/python/")
    if source.path.endswith("/__init__.py") and "/tests/" not in source.path
]


@pytest.mark.parametrize("source", PACKAGES, ids=lambda source: source.path)
def test_package_exports_exactly_what_all_lists(source: Source) -> None:
    imported, defined = _public_names(source.tree)
    listed = _listed_names(source.tree)
    if listed is None:
        assert imported | defined == set(), "a package that binds names lists them in __all__"
        return
    # What a package defines it exports. Its imports are its tools, unless it defines nothing and only passes them on.
    required = defined or imported
    assert required <= set(listed) <= imported | defined
    assert len(listed) == len(set(listed))


def _public_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names without a leading underscore that the module imports, and those that it defines."""
    imported: set[str] = set()
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
    return _public(imported), _public(defined)


def _public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _listed_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            names = ast.literal_eval(node.value)
            return [str(name) for name in names]
    return None
