"""Graders: OpenAI's JSON form of a score, with templates that take the answer and the row."""
