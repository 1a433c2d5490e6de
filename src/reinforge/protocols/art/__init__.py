"""OpenPipe ART: the adapter that trains at an ART server, and the server that ART's clients train at."""
