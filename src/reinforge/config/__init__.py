"""From a YAML file to a validated configuration."""
