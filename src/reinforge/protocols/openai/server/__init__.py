"""OpenAI's fine-tuning API on one's own machine: files, jobs that are runs, and the models that they make."""
