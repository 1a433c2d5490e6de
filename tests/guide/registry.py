"""Where the guide's files find every type they name."""

from reinforge.registry import REGISTRY, Registry

from . import register  # noqa: F401  the guide's components


def guide_registry() -> Registry:
    """Returns a registry that knows `_type: openai` too; ours where it is there already."""
    if "openai" in REGISTRY.names("llm"):
        return REGISTRY
    from tests.unit.config.components import OpenAIConfig, component

    registry = REGISTRY.child()
    registry.add("llm", OpenAIConfig, component)
    return registry
