"""Runs that train on another reinforge server: wire format, adapter and server."""
