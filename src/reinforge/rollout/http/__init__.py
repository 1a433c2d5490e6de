"""The HTTP interface of an episode: one handler for the clients in this process and for the gateway."""
