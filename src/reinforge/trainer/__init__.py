"""Decides what happens next: the loop, the record, the verdict."""
