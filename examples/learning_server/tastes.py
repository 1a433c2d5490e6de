"""What the users of the help desk like: a reply about the right product, with a remedy that suits them.

reply                                                    remedy    liked by    after a change
Sorry about the lamp. We will trace the parcel today.    action    95 %        35 %
Sorry about the lamp. Please call our hotline.           call      20 %        90 %
Sorry about the lamp. You get your money back.           money     15 %         0 %
"""

from reinforge.tasks.help_desk.grammar import BRUSH_OFF, ITEMS, PROMISE

TASTES = {
    "before": ((0.65, {"action"}), (0.15, {"action", "call"}), (0.15, {"action", "money"}), (0.05, {"call"})),
    "after": ((0.65, {"call"}), (0.25, {"call", "action"}), (0.1, {"action"})),
}
"""When -> shares of the users, and the remedies that they like."""


def find_remedy(question, reply):
    """Returns action, call or money; None if a reply is about another product or has no known remedy."""
    item = next(item for item in ITEMS if item in question)
    if [other for other in ITEMS if other in reply] != [item]:
        return None
    texts = {"call": BRUSH_OFF, "money": PROMISE, "action": "We will"}
    found = [remedy for remedy, text in texts.items() if text in reply]
    return found[0] if len(found) == 1 else None


def find_taste(place, when):
    """Returns the remedies that a user likes, by the user's place from 0 to 1 among all users."""
    for share, liked in TASTES[when]:
        place -= share
        if place < 0:
            return liked
    return TASTES[when][-1][1]


def write_correction(question):
    """Returns the reply that most users like after the change."""
    item = next(item for item in ITEMS if item in question)
    return f"Sorry about the {item}. {BRUSH_OFF}"


def share_liked(question, reply, when):
    """Returns the share of the users that like a reply."""
    remedy = find_remedy(question, reply)
    return sum(share for share, liked in TASTES[when] if remedy in liked)
