"""Training over a wire: OpenAI, ART, Tinker, our sessions and NeMo Customizer, client and server in one folder."""
