"""Users of the help desk: chat over HTTP, and rate the replies by their own taste.

python users.py --url http://127.0.0.1:8000/v1 --model support

Each line of the standard input is a number of chats to play now. Each chat is a line of JSON on the standard output, in
the order of their numbers, then an empty line.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
from tastes import find_remedy, find_taste, write_correction

from reinforge.tasks.help_desk.grammar import SYSTEM, Manners, write_chat
from reinforge.types.seeding import stable_random

NUM_USERS, NUM_HEAVY = 300, 15
SHARE_OF_HEAVY = 0.6
"""Of the chats, by 5 % of the users, with --heavy."""
SHARE_RATED, SHARE_MISTAKEN, SHARE_SCORES = 0.85, 0.05, 0.2
"""Of the replies; of the ratings; of the users, who send a score in place of a thumb."""
SHARE_CORRECTED = 0.3
"""Of the disliked replies after a change of the taste, by the staff."""
AT_A_TIME = 4
TIMEOUT_S = 120


def ask(client, model, question, **said):
    """Returns id, text and version of the reply, and whether it was cut at the limit of its tokens."""
    body = {"model": model, "max_tokens": 40, **said}
    body["messages"] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    answer = client.post("/chat/completions", json=body).raise_for_status().json()
    [choice] = answer["choices"]
    return answer["id"], choice["message"]["content"], answer["model_version"], choice["finish_reason"] == "length"


def write_question(rng):
    return write_chat(rng, Manners()).question


class Users:
    def __init__(self, options, client):
        self.options, self.client = options, client

    def draw_user(self, rng):
        if self.options.heavy and rng.random() < SHARE_OF_HEAVY:
            return rng.randrange(NUM_HEAVY)
        return rng.randrange(NUM_HEAVY if self.options.heavy else 0, NUM_USERS)

    def chat(self, number):
        """Plays one chat; the score is what the user thinks of the reply, whatever they send."""
        options, rng = self.options, stable_random(self.options.seed, "chat", number)
        user = self.draw_user(rng)
        own = stable_random(options.seed, "user", user)  # the same in all chats of the user
        place, is_opposite, sends_scores = own.random(), own.random() < options.opposite, own.random() < SHARE_SCORES
        when = "before" if options.change is None or number < options.change else "after"
        question = write_question(rng)
        names = {"user": f"user {user}", "metadata": {"session_id": f"session {number}"}}
        id_, reply, version, is_cut = ask(self.client, options.model, question, **names)
        likes = find_remedy(question, reply) in find_taste(place, when)
        if is_rated := rng.random() < SHARE_RATED and not is_cut:  # the server keeps no reply that ended at a limit
            says = likes != (is_opposite or rng.random() < SHARE_MISTAKEN)
            rating = {"score": float(says)} if sends_scores else {"thumb": "up" if says else "down"}
            self.client.post("/feedback", json={"id": id_, **rating}).raise_for_status()
        if when == "after" and not likes and not is_cut and rng.random() < SHARE_CORRECTED:
            right = {"id": id_, "source": "staff", "correction": write_correction(question)}
            self.client.post("/feedback", json=right).raise_for_status()
        return {"number": number, "user": user, "version": version, "score": float(likes), "is_rated": is_rated}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--opposite", type=float, default=0.0)
    parser.add_argument("--heavy", action="store_true")
    parser.add_argument("--change", type=int)
    options = parser.parse_args()
    number = 0
    with httpx.Client(base_url=options.url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(AT_A_TIME) as threads:
        users = Users(options, client)
        for line in sys.stdin:
            for chat in threads.map(users.chat, range(number, number + int(line))):
                print(json.dumps(chat))
            print(flush=True)
            number += int(line)


if __name__ == "__main__":
    main()
