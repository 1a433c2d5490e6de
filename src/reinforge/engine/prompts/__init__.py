"""Messages to tokens by a chat template, and tokens to text."""
