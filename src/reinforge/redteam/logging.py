"""The names of `reinforge.redteam.utils.logging` at the address that astra-rl's guides use."""

from reinforge.redteam.utils.logging import ASTRAWandbLogger, config_logging, logger

__all__ = ["ASTRAWandbLogger", "config_logging", "logger"]
