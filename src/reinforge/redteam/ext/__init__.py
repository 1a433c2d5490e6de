"""The same classes for models of other libraries: `transformers`."""
