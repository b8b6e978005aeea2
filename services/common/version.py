"""The version of this build, from the installed distribution, and versions of weights in few letters."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "treadle"


def treadle_version() -> str:
    """Return the version of the installed distribution, or ``0+unknown`` when run without installing."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


def short_weight_version(weight_version: str) -> str:
    """Shorten the digest of the files, and keep what was made of them at load. For people; compare the whole. Pure."""
    digest, dash, variant = weight_version.partition("-")
    return f"{digest[:8]}{dash}{variant}"
