"""Logging under astra-rl's names."""

from reinforge.redteam.utils.logging import ASTRAWandbLogger, config_logging, logger

__all__ = ["ASTRAWandbLogger", "config_logging", "logger"]
