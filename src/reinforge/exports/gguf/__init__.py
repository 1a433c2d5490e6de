"""GGUF files: read as models, and written for llama.cpp and Ollama."""
