"""Serves models over OpenAI's and Anthropic's APIs, and the training of models over the APIs of other projects."""
