"""Import paths of other projects that lead to reinforge's own objects, on request."""
