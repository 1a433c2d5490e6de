"""OpenAI's fine-tuning API: the adapter that trains at the service, and the server that speaks it."""
