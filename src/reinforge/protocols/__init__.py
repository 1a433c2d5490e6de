"""Training over a wire, client and server in one folder; `PROTOCOLS` in `serving/command.py` lists the servers."""
