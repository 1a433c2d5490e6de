"""torchrun's store, through which processes find each other."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from reinforge.errors import BackendUnavailable

TIMEOUT = timedelta(minutes=5)


def open_store(address: tuple[str, int], prefix: str) -> Store:
    """Returns the store at an address, with keys of our own.

    Args:
        address: Host and port.
        prefix: What the keys begin with.

    Raises:
        BackendUnavailable: It cannot be reached.
    """
    host, port = address
    try:
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    except RuntimeError as error:
        raise BackendUnavailable(f"torchrun's store at {host}:{port} cannot be reached: {error}") from error
