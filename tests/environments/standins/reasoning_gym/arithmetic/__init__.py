raise ImportError("a folder imports all of its datasets")
