"""Reads exports of tracing tools and chat logs: model calls, messages, scores and thumbs."""
