"""Questions at a shop's counter, for agents with two tools: `lookup`, the price of an article, and `calculate`.

questions.py   articles, wordings, what a clerk does step by step, and the dataset of questions
words.json     prices and wordings
starter.py     the agent's initial model, trained on first use; it often skips a tool or misuses one

`examples/tool_agent` trains agents of several frameworks on it.
"""
