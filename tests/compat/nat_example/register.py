from . import accuracy, player  # noqa: F401
