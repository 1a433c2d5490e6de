"""The same with the names of other libraries: `transformers`."""
