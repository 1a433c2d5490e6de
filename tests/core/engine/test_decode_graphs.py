"""Recorded decode steps: which sizes there are, and that replies are the same across growth and new weights."""

import pytest
import torch

from reinforge.engine.sampling import fast_llama
from reinforge.engine.sampling.decode_graphs import DecodeGraphs
from tests.engines import load_engine, train
from tests.samples import random_samples, sample_replies


class Recorder:
    """Records as a GPU does: a recording reads the tensors of the time of recording, and overwrites its logits."""

    def __init__(self, error=None):
        self.error, self.recorded, self.replayed = error, 0, 0

    def begin(self):
        pass

    def __call__(self, step, token_ids, positions):
        if self.error is not None:
            raise self.error
        self.recorded += 1
        inputs = token_ids.clone(), positions.clone()
        logits = step(*inputs)

        def replay(*current):
            self.replayed += 1
            for own, tensor in zip(inputs, current, strict=True):
                own.copy_(tensor)
            return logits.copy_(step(*inputs))

        return replay


def test_four_sizes_between_powers_of_two():
    assert [DecodeGraphs.round_size(size) for size in (1, 3, 5, 8, 9, 33, 65, 1000)] == [1, 3, 5, 8, 10, 40, 80, 1024]


def sample_twice(folder, monkeypatch, graphs):
    """Tokens and log-probs of 16 replies before a job and 16 after it, of 3 and of 40 tokens."""
    found = []
    monkeypatch.setattr(fast_llama, "make_graphs", lambda model: graphs)
    with load_engine(folder, max_num_seqs=8) as engine:
        prompts = [tuple(range(5, 8 + number)) for number in range(8)]
        for version in range(2):
            for limit in (3, 40):
                found += [(reply.token_ids, reply.logprobs) for reply in sample_replies(engine, prompts, limit)]
            engine.policy.sampler.pause()
            engine.policy.sampler.call(lambda: train(engine, random_samples(4)))
            engine.policy.sampler.resume(version + 1)
        assert engine.policy.sampler._prefiller.fast_llama is not None
    return found


@pytest.fixture(scope="module")
def launched(tiny_model_dir):
    with pytest.MonkeyPatch.context() as patch:
        return sample_twice(tiny_model_dir, patch, None)


def differ(first, second):
    return max(
        abs(a - b) if tokens == others else 1.0
        for (tokens, logprobs), (others, expected) in zip(first, second, strict=True)
        for a, b in zip(logprobs, expected, strict=False)
    )


def test_recorded_steps_follow_slots_and_weights(tiny_model_dir, monkeypatch, launched):
    """Mutation check: recordings that are kept compute with old weights and slots."""
    recorder = Recorder()
    assert differ(sample_twice(tiny_model_dir, monkeypatch, DecodeGraphs(recorder)), launched) < 1e-4
    assert 4 <= recorder.recorded <= recorder.replayed / 4
    graphs = DecodeGraphs(Recorder())
    graphs.clear = lambda: None
    with pytest.raises(AssertionError):  # it writes beyond the slots, or replies differ
        assert differ(sample_twice(tiny_model_dir, monkeypatch, graphs), launched) < 1e-4


@pytest.mark.slow
def test_recording_fails(tiny_model_dir, monkeypatch, caplog, launched):
    """Steps go on as before, and a shortage of memory is left to those who can free some."""
    graphs = DecodeGraphs(Recorder(RuntimeError("operation not permitted when stream is capturing")))
    assert differ(sample_twice(tiny_model_dir, monkeypatch, graphs), launched) < 1e-4
    assert "not recorded as CUDA graphs (slower): operation not permitted" in caplog.text
    graphs, tensor = DecodeGraphs(Recorder(torch.OutOfMemoryError("no memory"))), torch.zeros(1)
    graphs.run(torch.add, 1, [], tensor, tensor)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(torch.add, 1, [], tensor, tensor)
