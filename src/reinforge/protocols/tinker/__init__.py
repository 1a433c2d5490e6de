"""Tinker's protocol: the adapter that trains at the service, and the server that its SDK trains at."""
