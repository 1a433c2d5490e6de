"""Tinker's protocol: programs written for Tinker's service train against this server."""
