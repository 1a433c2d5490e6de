"""The resolved configuration, dumped and reloaded."""

import pytest
import yaml

from reinforge.config.dump import compare_configs, dump_config
from reinforge.config.loader import build_config, load_config
from reinforge.errors import ConfigError
from reinforge.evaluation.datasets import JsonlDatasetConfig, file_dataset
from reinforge.safe_text import redact_secrets
from tests.core.config.components import COMPLETE, KEY, registry


def load(path, environ=KEY):
    return load_config(path, registry=registry(), environ=environ)


def write(folder, text):
    path = folder / "f.yml"
    path.write_text(text)
    return path


def test_dump_and_reload_give_the_same_configuration(tmp_path):
    loaded = load(write(tmp_path, COMPLETE))
    text = dump_config(loaded)
    again = load(write(tmp_path, text))
    assert again.config == loaded.config
    assert dump_config(again) == text


def test_every_default_is_dumped_and_variables_stay_text(tmp_path):
    text = dump_config(load(write(tmp_path, COMPLETE)))
    plain = yaml.safe_load(text)
    assert plain["finetuning"]["limits"]["episode_timeout_s"] == 120.0
    assert plain["trainer_adapters"]["my_adapter"]["_type"] == "my_trainer_adapter"
    assert plain["trainer_adapters"]["my_adapter"]["precision"] == "fp32"
    assert plain["trainer_adapters"]["my_adapter"]["backend"]["timeout"] == 3600
    assert plain["trainer_adapters"]["my_adapter"]["backend"]["api_key"] == "${TRAINING_API_KEY}"
    assert plain["eval"]["general"]["dataset"]["file_path"] == "data/train.json"
    assert "sk-canary-1" not in text


def test_a_secret_is_never_written(tmp_path):
    text = "llms: {a-b: {_type: openai, model_name: m, api_key: sk-canary-3}}"
    dumped = dump_config(load(write(tmp_path, text)))
    assert "sk-canary-3" not in dumped
    with pytest.raises(ConfigError, match="the environment variable LLMS_A_B_API_KEY is not set"):
        load(write(tmp_path, dumped))
    again = load(tmp_path / "f.yml", {"LLMS_A_B_API_KEY": "sk-canary-3"})
    assert again.config.llms["a-b"].api_key.get_secret_value() == "sk-canary-3"
    kept = dump_config(load(write(tmp_path, text.replace("sk-canary-3", '"${K}"')), {"K": "sk-canary-3"}))
    assert "sk-canary-3" not in kept
    assert "${K}" in kept


SECRETS = """
llms:
  x:
    _type: openai
    model_name: m
    extra_body:
      api_key: canary-1
      nested:
        headers: {Authorization: Bearer canary-2, X-Api-Key: canary-3, Accept: json}
        list: [{password: 81234567}]
      by_form: sk-canary-4567
      url: "https://user:canary-5@host/x"
      from_variable: "${K}"
      session_token: "${K}"
      eos_token: "<|end|>"
      max_tokens: 5
      empty: {api_key: EMPTY, token: "", secret: none}
"""


def test_secrets_are_found_by_key_and_by_form_and_stay_out(tmp_path, caplog):
    loaded = load_config(write(tmp_path, SECRETS), environ={"K": "canary-6-of-the-environment"})
    dumped = dump_config(loaded)
    assert "canary" not in dumped
    assert "81234567" not in dumped
    body = yaml.safe_load(dumped)["llms"]["x"]["extra_body"]
    assert body["api_key"] == "${LLMS_X_EXTRA_BODY_API_KEY}"
    assert body["nested"]["headers"]["Accept"] == "json"
    assert body["nested"]["list"] == [{"password": "${LLMS_X_EXTRA_BODY_NESTED_LIST_0_PASSWORD}"}]
    assert (body["from_variable"], body["session_token"]) == ("${K}", "${K}")
    assert (body["eos_token"], body["max_tokens"]) == ("<|end|>", 5)
    assert body["empty"] == {"api_key": "EMPTY", "token": "", "secret": "none"}
    written = [line for line in caplog.messages if "is written in the configuration" in line]
    assert len(written) == 6
    assert f"{tmp_path}/f.yml:7:7 llms.x.extra_body.api_key is written in the configuration; use ${{VAR}}" in written[0]
    shown = redact_secrets("canary-2 Bearer canary-2 canary-5 canary-6-of-the-environment 81234567")
    assert "canary-6" not in shown
    assert "81234567" not in shown


def test_control_characters_are_written_as_escapes(tmp_path):
    note = '\x1b]0;t\x07 \u202e \x9b \\ " é\nsecond \u2028 line'
    loaded = build_config({"trainers": {"t\x1b": {"_type": "my_trainer", "note": note}}}, registry=registry())
    text = dump_config(loaded)
    assert not {"\x1b", "\x07", "\u202e", "\x9b", "\u2028"} & set(text)
    assert "é" in text
    assert load(write(tmp_path, text), {}).config.trainers["t\x1b"].note == note


@pytest.mark.parametrize(
    "note", ["1e-5", "on", "0o7", "null", "${X}", "a: b", "12:30", "", " x ", "é\n# no", "<<", "-"]
)
def test_text_that_looks_like_another_type_stays_text(tmp_path, note):
    loaded = build_config({"trainers": {"t": {"_type": "my_trainer", "note": note}}}, registry=registry())
    assert load(write(tmp_path, dump_config(loaded)), {}).config.trainers["t"].note == note


def test_a_variable_that_a_validator_moved_to_another_key_stays_text(tmp_path):
    components = registry()
    components.add("dataset", JsonlDatasetConfig, file_dataset)
    text = "eval: {general: {dataset: {_type: jsonl, file_path: d, structure: {question_key: '${Q}'}}}}"
    loaded = load_config(write(tmp_path, text), registry=components, environ={"Q": "canary"})
    dumped = dump_config(loaded)
    assert "canary" not in dumped
    again = load_config(write(tmp_path, dumped), registry=components, environ={"Q": "canary"})
    assert again.config == loaded.config


def some_agent(item, llm, context):
    return ""


def test_python_objects_are_named():
    data = {"workflow": {"_type": "my_agent_workflow", "function": some_agent}}
    plain = yaml.safe_load(dump_config(build_config(data, registry=registry())))
    assert plain["workflow"]["function"].startswith("<python ")
    assert plain["workflow"]["function"].endswith("test_dump:some_agent>")


def differing(before, after):
    return [str(change) for change in compare_configs(before, after)]


def test_values_that_differ_are_listed_with_their_paths():
    assert differing("finetuning: {seed: 1}", "finetuning: {seed: 2}") == ["finetuning.seed: 1 -> 2"]
    assert differing("llms: {a: {_type: policy}}", "llms: {}") == ['llms.a._type: "policy" -> nothing']
    assert differing("llms: {a: null}", "llms: {}") == []


def test_a_key_that_is_new_counts_as_having_had_its_default():
    before = "finetuning: {algorithm: {_type: grpo}, policy: {model: m}}"
    assert differing(before, before.replace("_type: grpo", "_type: grpo, clip_low: 0.2")) == []
    assert differing(before, before.replace("_type: grpo", "_type: grpo, clip_low: 0.3")) == [
        "finetuning.algorithm.clip_low: 0.2 -> 0.3"
    ]


def test_a_block_that_is_switched_on_is_a_change():
    before = "finetuning: {policy: {model: m}}"
    after = "finetuning: {policy: {model: m, lora: {r: 16}}}"
    assert differing(before, after) == ["finetuning.policy.lora.r: nothing -> 16"]
