"""A copy of the trained weights serves the published version while a job trains."""

import asyncio
import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from reinforge.config.policy import LoRAConfig
from reinforge.engine.model.served_copy import SamplerTurns
from reinforge.engine.sampling.sampler import ReplySampler
from reinforge.errors import EngineError, JobFailed
from reinforge.trainer.versions import probe
from reinforge.types.sample import Needs
from tests.engines import CLIPPED, load_engine, measure_error
from tests.samples import ask, make_sample, random_samples, request

LORA = {"lora": LoRAConfig(r=4, lora_alpha=8)}


def load(folder, **settings):
    policy = {"batch": {"steps_per_job": 2, "micro_batch_tokens": 32}, "optimizer": {"learning_rate": 0.01}}
    policy |= {"schedule": {"warmup_steps": 0}, "max_num_seqs": 8, "serves_during_jobs": True}
    return load_engine(folder, **{**policy, **settings})


def train(engine, seed=0, adapter=None):
    engine.update(random_samples(6, seed), CLIPPED, progress_start=0.0, progress_end=0.1, adapter=adapter)


def make_job(engine, seed=0):
    engine.begin_job()
    train(engine, seed)
    engine.end_job()


@pytest.fixture(scope="module")
def loaded(tiny_model_dir):
    engines = {"full": load(tiny_model_dir, keep_initial=True), "lora": load(tiny_model_dir, keep_initial=True, **LORA)}
    yield engines
    for each in engines.values():
        each.close()


def reset(engine):
    engine.begin_job()
    engine.reset()
    engine.end_job()
    asyncio.run(engine.policy.publish(0))
    return engine


@pytest.fixture
def full(loaded):
    return reset(loaded["full"])


@pytest.fixture
def lora(loaded):
    return reset(loaded["lora"])


@pytest.fixture(params=["full", "lora"])
def engine(request, loaded):
    return reset(loaded[request.param])


def test_replies_of_the_published_version_come_during_a_job_and_after_it(engine):
    engine.begin_job()
    [before] = ask(engine.policy, [request(seed=1)])
    train(engine)
    [during] = ask(engine.policy, [request(seed=1)])
    with pytest.raises(EngineError, match="job is still open"):
        asyncio.run(engine.policy.publish(1))
    engine.end_job()
    [ended] = ask(engine.policy, [request(seed=1)])
    assert [each.tokens.policy_version for each in (before, during, ended)] == [0, 0, 0]
    assert before.tokens.logprobs == during.tokens.logprobs == ended.tokens.logprobs
    assert measure_error(engine, [ended]) > 1e-2, "the learner has other weights by now"
    asyncio.run(engine.policy.publish(1))
    [after] = ask(engine.policy, [request(seed=1)])
    assert after.tokens.policy_version == 1
    assert measure_error(engine, [after]) < 1e-4


@pytest.mark.slow
def test_the_canary_finds_a_copy_that_was_not_updated(engine, monkeypatch):
    """Mutation check: the copy is the second place where weights could be forgotten."""

    async def publish(version):
        make_job(engine)
        await engine.policy.publish(version)
        return await probe(engine.policy, version, {}, None)

    assert asyncio.run(publish(1)).max_difference < 1e-4
    monkeypatch.setattr(engine.policy, "_copy_weights", lambda: None)
    with pytest.raises(JobFailed, match="does not serve the trained weights"):
        asyncio.run(publish(2))


def test_a_copy_of_adapters_shares_the_weights_below_them(lora):
    own = {name: p.data_ptr() for name, p in lora.model.module.named_parameters()}
    served = {name: p.data_ptr() for name, p in lora.policy.sampler.model.module.named_parameters()}
    shared = {name for name in own if own[name] == served[name]}
    assert own.keys() - shared == lora.model.trained_parameters.keys()
    assert len(shared) > len(own) / 3


@pytest.mark.slow
def test_each_of_several_adapters_is_served_from_its_own_copy(tiny_model_dir):
    with load(tiny_model_dir, adapters=("a", "b"), **LORA) as engine:
        engine.begin_job("a", "b")
        train(engine, 0, "a")
        train(engine, 1, "b")
        engine.end_job()
        [old] = ask(engine.policies["b"], [request(seed=1)])
        asyncio.run(engine.policies["a"].publish(1))
        [same] = ask(engine.policies["b"], [request(seed=1)])
        assert (same.tokens.policy_version, same.tokens.logprobs) == (0, old.tokens.logprobs)
        asyncio.run(engine.policies["b"].publish(1))
        replies = {name: ask(policy, [request(seed=1)])[0] for name, policy in engine.policies.items()}
        assert all(measure_error(engine, [reply], name) < 1e-4 for name, reply in replies.items())
        assert replies["a"].tokens.logprobs != replies["b"].tokens.logprobs


def test_a_job_that_is_undone_was_never_served(engine):
    [before] = ask(engine.policy, [request(seed=1)])
    engine.begin_job()
    train(engine)
    engine.rollback()
    [after] = ask(engine.policy, [request(seed=1)])
    assert after.tokens.policy_version == 0
    assert after.tokens.logprobs == before.tokens.logprobs
    assert measure_error(engine, [after]) < 1e-4


def test_a_checkpoint_is_served_from_its_publication_on(full, tmp_path):
    make_job(full)
    asyncio.run(full.policy.publish(1))
    full.save(tmp_path / "c", 1)
    [trained] = ask(full.policy, [request(seed=1)])
    make_job(full, seed=3)
    asyncio.run(full.policy.publish(2))
    full.load_weights(tmp_path / "c")
    asyncio.run(full.policy.publish(1))
    [restored] = ask(full.policy, [request(seed=1)])
    assert restored.tokens.logprobs == trained.tokens.logprobs


EXCHANGED = 5  # tokens that the older weights sample


@pytest.fixture(scope="module", params=["full", "lora"])
def keeping(request, tiny_model_dir):
    """An engine whose replies continue with weights that are published; those of its first job."""
    policy = {"max_model_len": 256, **(LORA if request.param == "lora" else {})}
    with load(tiny_model_dir, in_flight="keep", **policy) as engine:
        make_job(engine)
        yield engine


def ask_while_publishing(engine, monkeypatch, version, *requests):
    """Returns the replies to requests during which the weights of the last job are published."""
    sampler, step, num_steps = engine.policy.sampler, engine.policy.sampler._step, 0

    def count_steps():
        nonlocal num_steps
        num_steps += 1
        if num_steps == EXCHANGED:  # the first token is that of the prompt
            engine.policy.open(version)
        step()

    with monkeypatch.context() as patched:
        patched.setattr(sampler, "_step", count_steps)
        return ask(engine.policy, requests)


def test_a_reply_in_flight_continues_with_new_weights_and_says_from_which_token_on(keeping, monkeypatch):
    """The newer weights read the keys that the older ones computed, of all tokens but the last one."""
    served = copy.deepcopy(keeping.policy.sampler.model.module)
    version = keeping.policy.version
    [reply] = ask_while_publishing(keeping, monkeypatch, version + 1, request(seed=1, max_tokens=12, ignore_eos=True))
    tokens = reply.tokens
    assert (tokens.policy_version, tokens.later_versions) == (version, ((EXCHANGED, version + 1),))
    assert (reply.version, reply.newest_version) == (version, version + 1)
    assert tokens.list_versions() == [version] * EXCHANGED + [version + 1] * 7
    prompt, ids = [*tokens.prompt_token_ids], [*tokens.token_ids]
    with torch.inference_mode():
        old = served(torch.tensor([prompt + ids[: EXCHANGED - 1]]), use_cache=True)
        new = keeping.policy.sampler.model.module(
            torch.tensor([ids[EXCHANGED - 1 : -1]]), past_key_values=old.past_key_values
        )
    logits = torch.cat((old.logits[0, len(prompt) - 1 :], new.logits[0]))
    logprobs = torch.log_softmax(logits.float(), -1)[torch.arange(12), torch.tensor(ids)]
    np.testing.assert_allclose(tokens.logprobs, logprobs, atol=1e-4)
    unchanged = served(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    unchanged = torch.log_softmax(unchanged.float(), -1)[torch.arange(12), torch.tensor(ids)].detach()
    differences = np.abs(np.array(tokens.logprobs) - unchanged.numpy())
    assert differences[:EXCHANGED].max() < 1e-4 < 1e-3 < differences[EXCHANGED:].max()


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
@pytest.mark.parametrize("policy", [{}, LORA], ids=["full", "lora"])
def test_recomputed_replies_have_the_log_probs_of_the_new_weights(tiny_model_dir, monkeypatch, policy, in_flight):
    """From the exchange on they are those of the whole reply; with `keep` they are not."""
    with load(tiny_model_dir, in_flight=in_flight, max_model_len=256, **policy) as engine:
        make_job(engine)
        asked = [request("many words " * n, seed=n, max_tokens=12, ignore_eos=True) for n in (1, 9, 3)]
        for tokens in (each.tokens for each in ask_while_publishing(engine, monkeypatch, 1, *asked)):
            [scores] = asyncio.run(engine.policy.score([[*tokens.prompt_token_ids, *tokens.token_ids]]))
            differences = np.abs(scores[-12:] - tokens.logprobs)
            assert tokens.list_versions() == [0] * EXCHANGED + [1] * 7
            assert differences[:EXCHANGED].max() > 1e-3
            assert (differences[EXCHANGED:].max() < 1e-4) == (in_flight == "recompute")


def test_keys_of_mixed_weights_are_used_by_no_later_prompt(keeping, monkeypatch):
    make_job(keeping, seed=2)
    long = request("many words " * 6, seed=1, max_tokens=40, ignore_eos=True)
    [reply] = ask_while_publishing(keeping, monkeypatch, keeping.policy.version + 1, long)
    assert reply.tokens.later_versions
    history = (*reply.tokens.prompt_token_ids, *reply.tokens.token_ids, 5)
    [after] = ask(keeping.policy, [replace(request(seed=2), prompt=history)])
    assert after.tokens.later_versions == ()
    assert after.tokens.policy_version == keeping.policy.version
    assert measure_error(keeping, [after]) < 1e-4


def test_without_its_safety_keys_of_mixed_weights_would_be_used(keeping, monkeypatch):
    """Mutation check of the test above."""
    make_job(keeping, seed=3)
    cache, add = keeping.policy.sampler._prefix_cache, ReplySampler._add_to_prefix_cache

    def add_all(self, row):
        self._batch.requests[row].later_versions = []
        add(self, row)

    monkeypatch.setattr(ReplySampler, "_add_to_prefix_cache", add_all)
    long = request("many words " * 6, seed=1, max_tokens=40, ignore_eos=True)
    [reply] = ask_while_publishing(keeping, monkeypatch, keeping.policy.version + 1, long)
    assert len(cache)
    history = (*reply.tokens.prompt_token_ids, *reply.tokens.token_ids, 5)
    [after] = ask(keeping.policy, [replace(request(seed=2), prompt=history)])
    assert measure_error(keeping, [after]) > 1e-4


def test_a_request_that_waits_while_weights_are_exchanged_is_sampled_by_the_new_ones(keeping, monkeypatch):
    make_job(keeping, seed=4)
    version = keeping.policy.version
    many = [request(seed=seed, max_tokens=12, ignore_eos=True) for seed in range(12)]  # there are 8 slots
    replies = ask_while_publishing(keeping, monkeypatch, version + 1, *many)
    assert sorted({(each.version, each.newest_version) for each in replies}) == [
        (version, version + 1),
        (version + 1, version + 1),
    ]
    fresh = [each for each in replies if each.version == version + 1]
    assert len(fresh) == 4
    assert measure_error(keeping, fresh) < 1e-4


async def ask_in_flight(policy, streamed, *requests):
    """Returns the replies, the first of which is read as it is sampled if `streamed`."""

    async def read(request):
        return [part async for part in policy.stream(request)][-1]

    first = read(requests[0]) if streamed else policy.sample(requests[0])
    return await asyncio.gather(first, *map(policy.sample, requests[1:]))


@pytest.mark.parametrize("policy", [{}, LORA], ids=["full", "lora"])
def test_aborted_replies_are_sampled_again_by_the_new_weights(tiny_model_dir, policy):
    """Whatever constrains them begins again, too; a reply that is read as it grows continues."""
    settings = {"max_tokens": 12, "ignore_eos": True}
    asked = [
        request(seed=1, **settings),
        request(seed=2, **settings),
        request(seed=3, frequency_penalty=1.5, **settings),
    ]
    with load(tiny_model_dir, in_flight="abort", max_model_len=256, **policy) as engine:
        for version, streamed in ((1, False), (2, True)):
            make_job(engine, version)
            sampler, step, steps = engine.policy.sampler, engine.policy.sampler._step, []

            def publish_once(version=version, step=step, steps=steps):
                steps.append(version)
                if len(steps) == EXCHANGED:
                    engine.policy.open(version)
                step()

            sampler._step = publish_once
            first, *replies = asyncio.run(ask_in_flight(engine.policy, streamed, *asked))
            sampler._step = step
            assert first.tokens.list_versions() == (
                [version - 1] * EXCHANGED + [version] * 7 if streamed else [version] * 12
            )
            assert [each.tokens.list_versions() for each in replies] == [[version] * 12] * 2
            assert measure_error(engine, replies if streamed else [first, *replies]) < 1e-4
            later = asyncio.run(ask_in_flight(engine.policy, False, *asked))
            assert [each.tokens.token_ids for each in later[1:]] == [each.tokens.token_ids for each in replies]
            assert sampler.stats().running == 0


class Clock:
    """Each reading is a second after the last."""

    now_s = 0.0

    def __call__(self):
        self.now_s += 1
        return self.now_s


def test_the_sampler_gets_as_long_as_the_computation_before():
    given, clock = [], Clock()
    turns = SamplerTurns(given.append, clock)
    turns()
    assert given == [], "nothing shares the thread"
    with turns.share_thread():
        clock.now_s += 4
        turns()
        clock.now_s += 2
        turns()
    turns()
    assert given == [5, 3]


def test_replies_are_sampled_between_the_micro_batches_of_a_job(full, monkeypatch):
    """The job makes many micro-batches and ends only after a reply that was asked for when it had begun."""
    replied, turns = threading.Event(), full.learner.take_turns
    asked = threading.Thread(target=lambda: (ask(full.policy, [request()]), replied.set()))

    def take_turns():
        if not asked.is_alive() and not replied.is_set():
            asked.start()
        while not replied.wait(0.001):  # the reply needs a step of the sampler, which only a turn gives
            turns()

    monkeypatch.setattr(full.learner, "take_turns", take_turns)
    make_job(full)
    assert replied.is_set()
    asked.join()


@pytest.mark.parametrize("defer", [False, True])
def test_tokens_of_an_older_version_are_weighted_by_how_likely_they_are_now(full, defer):
    """c = min(p_old / p_sampler, tis_cap), p_old of the weights that the job starts from, where the ratio is 1."""
    [reply] = ask(full.policy, [request(seed=3)])
    make_job(full)
    asyncio.run(full.policy.publish(1))
    stale = make_sample(reply.tokens, advantage=1.0)
    stale.is_stale = True
    full.begin_job()
    full.score([stale], Needs(old_logprobs="inexact"), defer=defer)
    assert (stale.old_logprobs is None) == defer
    [current] = full.logprobs([stale])
    report = full.update([stale], CLIPPED, progress_start=0.0, progress_end=0.1)
    full.rollback()
    mask = stale.loss_mask
    weights = np.minimum(np.exp(current - stale.sampling_logprobs)[mask], 2.0)
    assert np.abs(weights - 1).max() > 0.01, "the versions differ"
    assert report.metrics["tis_weight"] == pytest.approx(weights.mean(), rel=1e-4)
    assert report.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert "mismatch" not in report.metrics, "another version is no mismatch of the computation"
    np.testing.assert_allclose(stale.old_logprobs[mask], current[mask], atol=1e-5)


def test_tokens_of_the_current_version_are_not_scored_again(full):
    fresh = make_sample(ask(full.policy, [request(seed=3)])[0].tokens)
    stale = make_sample(ask(full.policy, [request(seed=4)])[0].tokens)
    stale.is_stale = True
    full.score([fresh, stale], Needs(old_logprobs="inexact"))
    assert fresh.old_logprobs is None
    assert stale.old_logprobs is not None
    assert torch.isfinite(torch.from_numpy(stale.old_logprobs)).all()
