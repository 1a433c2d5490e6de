"""The model handle of a workflow: OpenAI's `chat.completions.create`, its arguments and what it returns."""
