"""A server with `--learn` that is killed with SIGKILL at any time loses no feedback that it has acknowledged."""

import sqlite3
import threading
import time

import httpx
import pytest

from reinforge.learning.store import STORE, read_chats
from tests.fault.killed_servers import KilledServers
from tests.fault.learning_server import serve
from tests.fault.sizes import scaled
from tests.serving.serving import says

NUM_KILLS = scaled(200)


class Rater(threading.Thread):
    """A client that chats and rates the answers; it repeats a request with the same key until it has a response.

    Attributes:
        acknowledged: Id of a chat -> the score that the server has taken.
    """

    def __init__(self, port, name, over):
        super().__init__(name=name)
        self.port, self.over, self.acknowledged = port, over, {}

    def run(self):
        number = 0
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30) as client:
            while not self.over.is_set():
                number += 1
                body = {"model": "m", "messages": says(f"{self.name} {number}")}
                answer = self.post(client, "/v1/chat/completions", body)
                score = {"id": answer["id"], "score": number, "key": f"{self.name}-{number}"}
                if "error" not in self.post(client, "/v1/feedback", score):  # a chat may be lost, and is then unknown
                    self.acknowledged[answer["id"]] = number

    def post(self, client, path, body):
        for _ in range(2000):
            try:
                return client.post(path, json=body).json()
            except httpx.TransportError:
                time.sleep(0.01)
        raise AssertionError("the server does not come back")


def find_losses(folder, raters):
    """Returns the acknowledged feedback that is not in the store as it was sent, once."""
    kept = {chat.id: chat.opinions for chat in read_chats(folder / STORE)}
    acknowledged = {id_: score for rater in raters for id_, score in rater.acknowledged.items()}
    lost = {id_: score for id_, score in acknowledged.items() if kept.get(id_) != {"user": {"score": score}}}
    with sqlite3.connect(folder / STORE) as db:
        assert db.execute("SELECT count(*) - count(DISTINCT request_key) FROM feedback").fetchone() == (0,)
    assert acknowledged
    return lost


def talk(server, over, num_clients=3):
    raters = [Rater(server.port, f"client{number}", over) for number in range(num_clients)]
    for rater in raters:
        rater.start()
    return raters


def kill_once(folder, site):
    """Returns the feedback that is lost when a server dies at a site while clients talk to it."""
    server, over = KilledServers(serve, folder), threading.Event()
    with server.restarted_after(site):
        raters = talk(server, over)
    server.wait_ready()
    time.sleep(0.3)
    over.set()
    for rater in raters:
        rater.join()
    server.close()
    return find_losses(server.folder, raters)


@pytest.mark.parametrize("site", ["db.before_commit:9", pytest.param("db.after_commit:40", marks=pytest.mark.slow)])
def test_feedback_survives_a_kill_around_its_commit(tmp_path, site):
    assert kill_once(tmp_path / "data", site) == {}


def test_feedback_that_is_acknowledged_before_its_commit_is_lost(tmp_path):
    """Mutation: the store does not wait until what it has done is on disk."""
    assert kill_once(tmp_path / "data", "early db.before_commit:9")


@pytest.mark.slow
def test_feedback_survives_kills_at_random_points(tmp_path):
    server = KilledServers(serve, tmp_path / "data")
    server.start()
    with server.killed_at_random(NUM_KILLS, 0.3) as over:
        raters = talk(server, over)
        for rater in raters:
            rater.join()
    server.close()
    assert find_losses(server.folder, raters) == {}
