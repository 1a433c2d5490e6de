"""`reinforge export`: a trained model for other programs, judged again, whole or not there."""

import hashlib
import json
import shutil
import sys

import pytest
from click.testing import CliRunner

import reinforge
from reinforge.cli import main
from reinforge.errors import BackendUnavailable, ConfigError
from reinforge.exports.api import ExportOptions, export_run, make_client, push_folder
from reinforge.exports.artifact import ArtifactOptions
from reinforge.exports.gguf import file as gguf_file
from tests.models import make_tiny_model
from tests.project import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    project = Project(folder, make_tiny_model(folder / "base"))
    project.set("finetuning.policy.lora", {"r": 8}).set("finetuning.policy.optimizer.learning_rate", 0.02)
    project.set("finetuning.num_epochs", 2).set("finetuning.sampling.temperature", 0.9)
    project.set("finetuning.gate.margin", -1)  # two epochs are not about the verdict
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "matplotlib", None)
        project.finetune(code=0)
    assert project.summary["promoted"], project.summary["reason"]
    return project


@pytest.fixture
def run(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    return project.run


def export(*arguments):
    return CliRunner().invoke(main, ["export", "r", "--output_dir", "runs", "--device", "cpu", *arguments])


def hash_files(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compute_logprobs(module, tokenizer):
    import torch

    ids = torch.tensor([tokenizer.encode("<|user|>say 3<|end|><|assistant|>ae", add_special_tokens=False)])
    with torch.no_grad():
        return module.eval()(input_ids=ids).logits.log_softmax(-1)


def load_run_model(project):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(project.model)
    return PeftModel.from_pretrained(base, project.run / "model"), AutoTokenizer.from_pretrained(project.run / "model")


@pytest.mark.slow
def test_a_merged_folder_is_the_model_of_the_run(project, run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = hash_files(run)
    result = export("--output", "merged", "--json")
    assert result.exit_code == 0, result.output
    assert hash_files(run) == before, "the run is only read"
    merged = project.folder / "merged"
    assert not (merged / "adapter_config.json").exists()
    tuned, tokenizer = load_run_model(project)
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    difference = compute_logprobs(loaded, AutoTokenizer.from_pretrained(merged)) - compute_logprobs(tuned, tokenizer)
    assert difference.abs().max() < 1e-4
    base = AutoModelForCausalLM.from_pretrained(project.model)
    assert (compute_logprobs(base, tokenizer) - compute_logprobs(tuned, tokenizer)).abs().max() > 0.1, (
        "LoRA did move it"
    )
    assert loaded.generation_config.temperature == 0.9
    assert loaded.generation_config.top_k == 0, "not transformers' default of 50"

    judged = json.loads(result.output)["judgement"]
    assert judged["program"].startswith("transformers ")
    assert judged["parity"]["num_equal_replies"] == judged["parity"]["num_prompts"] == 16
    assert judged["parity"]["max_difference"] < 1e-4
    assert judged["figure"]["num_examples"] == judged["run_figure"]["num_examples"] == 16
    assert judged["run_figure"]["mean"] == project.summary["confirm_tuned"]["mean"]
    exact = judged["figure"]["mean"] - judged["run_figure"]["mean"]
    assert judged["difference"]["mean_difference"] == pytest.approx(exact)
    card = (merged / "README.md").read_text()
    for text in ("Promoted: **yes**", f"{judged['figure']['mean']:.3f}", "temperature 0.9", "vllm serve", "history"):
        assert text in card
    assert str(project.folder) not in card, "paths of this machine are nobody's business"


@pytest.mark.slow
def test_an_adapter_names_its_base(project, run):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = export("--format", "peft", "--output", "adapter")
    assert result.exit_code == 0, result.output
    settings = json.loads((project.folder / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(project.model)
    assert not (project.folder / "adapter" / "training").exists()
    tuned, tokenizer = load_run_model(project)
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    loaded = PeftModel.from_pretrained(base, project.folder / "adapter")
    assert (compute_logprobs(loaded, tokenizer) - compute_logprobs(tuned, tokenizer)).abs().max() < 1e-6
    assert "16 of 16 greedy replies have the same tokens" in result.output

    result = export("--format", "peft", "--output", "renamed", "--base_model", "me/base", "--no_judge")
    assert result.exit_code == 0, result.output
    settings = json.loads((project.folder / "renamed" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "me/base"
    assert "base_model: me/base" in (project.folder / "renamed" / "README.md").read_text()
    assert "Not judged" in (project.folder / "renamed" / "README.md").read_text()


def test_a_gguf_file_is_judged_through_the_file(project, run):
    result = export("--format", "gguf", "--output", "gguf", "--judge_with", "transformers")
    assert result.exit_code == 0, result.output
    folder = project.folder / "gguf"
    assert {path.name for path in folder.iterdir()} == {"r-f32.gguf", "Modelfile", "README.md", "manifest.json"}
    assert "16 of 16 greedy replies have the same tokens" in result.output
    assert "16 examples, through the exported model" in result.output
    assert f"r-f32.gguf ({(folder / 'r-f32.gguf').stat().st_size / 1024:.1f} KiB)" in result.output
    modelfile = (folder / "Modelfile").read_text()
    for line in ("FROM ./r-f32.gguf", 'PARAMETER stop "<|end|>"', "PARAMETER temperature 0.9", "PARAMETER top_k 0"):
        assert line in modelfile.splitlines()
    assert "ollama create r -f Modelfile" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_the_judge_notices_an_exporter_that_forgets_the_permutation(project, run, monkeypatch):
    """Mutation check: the file is well formed, and only its judgement says that it is another model."""
    monkeypatch.setattr(gguf_file, "PERMUTED", set())
    options = ExportOptions(
        ArtifactOptions("gguf"), output=project.folder / "wrong", program="transformers", device="cpu"
    )
    parity = export_run("r", project.folder / "runs", options).judgement.parity
    assert not parity.is_equal
    assert parity.max_difference > 0.01


@pytest.mark.slow
def test_what_is_in_the_folder_already(project, run):
    place = project.folder / "again"
    assert export("--no_judge", "--output", "again").exit_code == 0
    assert export("--no_judge", "--output", "again", "--dtype", "bfloat16").exit_code == 0, "an export is replaced"
    assert json.loads((place / "config.json").read_text())["dtype"] == "bfloat16"
    (place / "notes.txt").write_text("mine")
    result = export("--no_judge", "--output", "again")
    assert result.exit_code == 2
    assert "holds files that no export has written: notes.txt" in result.output


def test_what_cannot_be_exported_is_refused(project, run, monkeypatch):
    def refuse(*arguments):
        result = export(*arguments)
        assert result.exit_code == 2, result.output
        return result.output

    assert "in the run folder" in refuse("--output", "runs/r/model")
    assert "only GGUF files are quantized" in refuse("--quantize", "q8_0")
    assert "it is for --format merged, not gguf" in refuse("--format", "gguf", "--dtype", "bfloat16")
    assert "llama.cpp runs GGUF files only" in refuse("--judge_with", "llama.cpp")
    assert "there is no adapter a" in refuse("--adapter", "a")
    monkeypatch.setenv("PATH", "")
    assert "llama-quantize, which is not on the PATH" in refuse("--format", "gguf", "--quantize", "q4_k_m")


def test_a_tokenizer_that_has_no_name_in_llama_cpp_is_refused_before_the_weights_are_read(project, tmp_path):
    shutil.copytree(project.run, tmp_path / "runs" / "r")
    model = tmp_path / "runs" / "r" / "model"
    for name in ("manifest.json", "adapter_model.safetensors"):
        (model / name).unlink()
    definition = json.loads((model / "tokenizer.json").read_text())
    definition["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    definition["pre_tokenizer"]["use_regex"] = False
    (model / "tokenizer.json").write_text(json.dumps(definition))
    options = ExportOptions(ArtifactOptions("gguf"), output=tmp_path / "out", judge=False)
    with pytest.raises(reinforge.ConfigError, match="no name for its pre-tokenizer"):
        export_run("r", tmp_path / "runs", options)
    assert not (tmp_path / "out").exists()


class Hub:
    """A double of the hub's client."""

    def __init__(self):
        self.calls = []

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append((repo_id, private))
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        from pathlib import Path

        self.calls.append(sorted(path.name for path in Path(folder_path).iterdir() if path.name not in ignore_patterns))


def test_a_promoted_model_is_uploaded_with_its_card(project, run):
    hub = Hub()
    options = ExportOptions(
        ArtifactOptions("merged"), output=project.folder / "pushed", judge=False, push="me/m", client=hub
    )
    done = export_run("r", project.folder / "runs", options)
    assert done.url == "https://hub/me/m"
    repository, names = hub.calls
    assert repository == ("me/m", True), "private unless asked"
    assert {"README.md", "model.safetensors"} <= set(names)
    assert "manifest.json" not in names


def test_a_model_that_was_not_promoted_is_not_uploaded(project, tmp_path):
    shutil.copytree(project.run, tmp_path / "runs" / "r")
    file = tmp_path / "runs" / "r" / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "promoted": False, "reason": "no better"}))
    hub = Hub()
    options = ExportOptions(ArtifactOptions("merged"), output=tmp_path / "out", judge=False, push="me/m", client=hub)
    with pytest.raises(reinforge.ConfigError, match=r"was not promoted: no better"):
        export_run("r", tmp_path / "runs", options)
    options.allow_not_promoted = True
    assert export_run("r", tmp_path / "runs", options).url is not None
    assert "Promoted: **no**" in (tmp_path / "out" / "README.md").read_text()


def test_an_adapter_of_a_folder_is_not_uploaded(project, run):
    options = ExportOptions(ArtifactOptions("peft"), judge=False, push="me/m", client=Hub())
    with pytest.raises(reinforge.ConfigError, match="a folder of this machine, which other machines do not have"):
        export_run("r", project.folder / "runs", options)


@pytest.mark.slow
async def test_from_python_inside_of_a_running_loop(project, run):
    done = reinforge.export("r", "peft", output="from-python", output_dir="runs", device="cpu")
    assert done.judgement.parity.is_equal
    assert done.judgement.difference.num_pairs == 16


@pytest.mark.slow
def test_a_run_of_python_functions_is_judged_with_them(tmp_path, project):
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
        return reply.choices[0].message.content

    def vowels(output, expected):
        return sum(letter in "aeiou" for letter in output) / max(1, len(output))

    rows = [{"id": str(i), "question": f"say {i}", "answer": "a"} for i in range(32)]
    summary = reinforge.finetune(
        agent,
        rows,
        vowels,
        make_tiny_model(tmp_path / "base"),
        2,
        settings={"policy": {"optimizer": {"learning_rate": 3e-3}, "batch": {"steps_per_job": 4}}, "device": "cpu"},
        output_dir=tmp_path / "runs",
        run_name="r",
    )
    assert summary.checkpoint is not None
    alone = reinforge.export(summary.folder, output=tmp_path / "alone", device="cpu").judgement
    assert alone.parity.is_equal
    assert alone.figure is None
    assert "reinforge.export(...) with the workflow" in alone.note
    with_them = {"workflow": agent, "dataset": rows, "reward": vowels}
    judged = reinforge.export(summary.folder, output=tmp_path / "out", device="cpu", **with_them).judgement
    assert judged.figure.num_examples == summary.confirm_tuned.num_examples
    assert judged.note == ""


TOKEN = "hf_" + "x" * 30


@pytest.mark.parametrize("name", ["model", "me/../x", "me/my model", "a/b/c", "/b"])
def test_names_that_are_no_models_are_refused(name):
    with pytest.raises(ConfigError, match="not the name of a model on the hub"):
        make_client(name)


def test_without_a_token_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="there is no token for the hub") as refused:
        make_client("me/m")
    assert "HF_TOKEN" in str(refused.value)


class Refusing:
    def create_repo(self, repo_id, *, private, exist_ok):
        raise RuntimeError(f"401: the token {TOKEN} may not write")


def test_a_failed_upload_says_where_the_folder_is_and_not_the_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    make_client("me/m")
    with pytest.raises(BackendUnavailable, match="401") as failed:
        push_folder(Refusing(), tmp_path, "me/m", "message", private=True)
    assert TOKEN not in str(failed.value)
    assert f"hf upload me/m {tmp_path}" in str(failed.value)
