"""Reads exports of tracing tools and chat logs, a file for each format that `make_formats` in `importer.py` lists."""
