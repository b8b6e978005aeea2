"""Import rules that import-linter cannot express: exact lists for cores, and names that must stay free."""

import importlib.util
import sys

from tests.repository.sources import ROOT, imported_modules, python_sources, sources_under

# A core decides; it neither waits, nor looks at a clock or the machine, nor talks.
BANNED_IN_CORES = {"asyncio", "time", "os", "logging", "socket", "subprocess", "threading", "random", "datetime"}
OURS_IN_CORES = ("services.common.errors", "services.common.verify", "services.common.clock")


def test_cores_import_the_standard_library_and_little_else() -> None:
    found = {
        source.path: bad
        for source in sources_under("services/")
        if "/core/" in source.path
        if (bad := {module for module in imported_modules(source.tree) if not _may_be_in_core(module, source.path)})
    }
    assert found == {}


def _may_be_in_core(module: str, path: str) -> bool:
    own_core = path[: path.index("/core/")].replace("/", ".") + ".core"
    if module.startswith((own_core, *OURS_IN_CORES)):
        return True
    top = module.split(".")[0]
    return top in sys.stdlib_module_names and top not in BANNED_IN_CORES


def test_nothing_imports_tests() -> None:
    found = [
        source.path
        for source in python_sources()
        if not source.path.startswith("tests/")
        if any(module.split(".")[0] == "tests" for module in imported_modules(source.tree))
    ]
    assert found == []


def test_benchmarks_and_scripts_speak_the_public_interface_only() -> None:
    # A kernel has no other public interface than its function.
    found = [
        source.path
        for source in sources_under("scripts/bench/")
        if any(
            module.split(".")[0] in {"services", "treadle_kernels"}
            for module in imported_modules(source.tree)
            if not (source.path.startswith("scripts/bench/kernels_") and module.startswith("treadle_kernels"))
        )
    ]
    assert found == []


def test_kernels_is_no_importable_package_of_ours() -> None:
    # A distribution of that name exists, and transformers imports it when it is there.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    if spec is not None:
        assert spec.origin is None or not spec.origin.startswith(str(ROOT))


def test_no_module_has_a_name_that_says_nothing() -> None:
    names = {"utils.py", "helpers.py", "misc.py", "util.py", "common.py"}
    assert [source.path for source in python_sources() if source.path.rsplit("/", 1)[-1] in names] == []
