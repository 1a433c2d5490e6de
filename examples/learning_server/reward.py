"""The check that decides on held-out chats whether a model becomes a candidate: what the shop knows of its users.

The thumbs train the model, but new replies have none. When the taste of the users changes, the shop changes this file.
"""

from tastes import share_liked

WHEN = "before"


def suits_users(item):
    """Returns the share of the users that like a reply."""
    question = next(each["content"] for each in reversed(item.input_obj) if each["role"] == "user")
    return share_liked(question, item.output_obj, WHEN)
