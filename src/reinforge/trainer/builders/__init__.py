"""The bundled trajectory builders: `group`, `tree`, `dataset`."""
