"""What flows between the parts; no torch here."""
