"""Where the guide's files find every type they name."""

from reinforge.registry import REGISTRY, Registry

from . import register  # noqa: F401  the guide's components


def guide_registry() -> Registry:
    """Returns the registry with the guide's components in it."""
    return REGISTRY
