raise ImportError("the whole package imports what one dataset needs")
