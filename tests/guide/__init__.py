"""The components of the extension guide (seed 002), as its reader writes them: only the import lines differ."""
