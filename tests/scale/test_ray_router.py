"""Which worker samples a reply."""

from reinforge.scale import engine_group as ray_router
from reinforge.scale.engine_group import Router, find_conversation
from reinforge.types.request import ModelRequest, SamplingParams


def message(role, content):
    return {"role": role, "content": content}


def test_siblings_and_turns_of_a_conversation_share_a_key():
    first = [message("system", "s"), message("user", "u")]
    key = find_conversation(ModelRequest(first, SamplingParams(seed=1)))
    later = [*first, message("assistant", "a"), message("user", "v")]
    assert find_conversation(ModelRequest(first, SamplingParams(seed=2))) == key
    assert find_conversation(ModelRequest(later)) == key
    assert find_conversation(ModelRequest([message("system", "s"), message("user", "w")])) != key
    assert find_conversation(ModelRequest(first, tools=[{"name": "t"}])) != key


def test_a_new_conversation_goes_to_the_least_busy_worker_and_stays():
    router = Router([0, 1, 2])
    assert [router.acquire(key) for key in "aab"] == [0, 0, 1]
    assert router.acquire("c") == 2
    router.release(1)
    assert router.acquire("d") == 1
    assert router.acquire("a") == 0, "it stays, although worker 0 has the most to do"


def test_the_conversations_of_a_lost_worker_go_elsewhere():
    router = Router([0, 1])
    assert [router.acquire("a"), router.acquire("b")] == [0, 1]
    router.remove(0)
    router.release(0)  # of the reply that was lost
    assert [router.acquire("a"), router.acquire("c")] == [1, 1]
    router.remove(1)
    assert router.acquire("a") is None, "no worker is left"
    router.add(2)
    assert router.acquire("a") == 2


def test_new_weights_and_too_many_conversations_are_forgotten(monkeypatch):
    monkeypatch.setattr(ray_router, "MAX_CONVERSATIONS", 2)
    router = Router([0, 1])
    for key in "abc":  # a on 0, b on 1, c on 0; a is forgotten
        router.acquire(key)
    assert router.acquire("a") == 1, "now the least busy one"
    router.forget()
    router.release(0)
    assert router.acquire("b") == 0
