"""The build hook: compiles the native CPU library wherever the project is installed or made into a wheel.

Without a working C++ compiler the installation still succeeds; ``treadle_kernels.cpu.unavailable_reason()`` then says
what is missing, and models run on the PyTorch path.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD_SCRIPT = Path("kernels", "treadle_kernels", "cpu", "build.py")


class NativeLibraryHook(BuildHookInterface[Any]):
    """Runs ``kernels/treadle_kernels/cpu/build.py`` and adds what it makes."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and mark the wheel as made for this platform."""
        script = _load(Path(self.root) / _BUILD_SCRIPT)
        self.app.display_info("compiling the native CPU library (about a minute) ...")
        try:
            library = script.build()
        except script.BuildError as error:
            self.app.display_warning(f"the native CPU library is left out: {error}")
            return
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _load(path: Path) -> ModuleType:
    """Import a file by its path: the package around it needs what is not installed yet."""
    spec = importlib.util.spec_from_file_location("treadle_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
