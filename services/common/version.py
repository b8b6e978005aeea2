"""The version of this build, from the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "treadle"


def treadle_version() -> str:
    """Return the version of the installed distribution, or ``0+unknown`` when run without installing."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"
