"""The data types that all parts share; does not import torch."""
