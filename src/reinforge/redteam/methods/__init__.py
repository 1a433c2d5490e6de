"""Ways to make conversations: `ast` is adaptive stress testing of text by text (ASTPrompter, arXiv:2407.09447)."""
