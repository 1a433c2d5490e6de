"""The bundled agents and their datasets."""
