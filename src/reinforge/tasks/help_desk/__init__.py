"""A help desk whose logged chats carry thumbs: `reinforge init --template logs` makes a project of them.

grammar.py   questions, replies, the house rules, and logs with thumbs
words.json   the words of questions and replies
starter.py   the model behind the logged replies, careless as they are; trained on first use
"""
