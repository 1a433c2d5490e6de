"""The bundled agents and their data."""
