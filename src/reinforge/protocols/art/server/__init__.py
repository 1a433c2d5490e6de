"""Training over the protocols of OpenPipe ART: its training service, and the server of `art run`."""
