"""Chat templates in Ollama's language, and the Modelfile."""

import re

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.exports.artifact import find_blocks, format_modelfile
from tests.models import CHAT_TEMPLATE

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are Smol.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}<|start|>{{ message.role }}<|stop|>\n\n"
    "{{ message.content }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
STRIPPING = "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}{% endfor %}>"
MERGED_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for message in messages if message.role != 'system' %}[{{ message.role }}]"
    "{{ system if loop.first else '' }}{{ message.content }}{% endfor %}[assistant]"
)


def renderer(template):
    compiled = _compile_jinja_template(template)
    return lambda messages, prompt: compiled.render(messages=messages, add_generation_prompt=prompt)


def run_go_template(text, messages):
    """Renders the few constructs of Go's templates that are written here, by their meaning in Ollama."""
    has_system = any(message["role"] == "system" for message in messages)
    text = re.sub(
        r"\{\{ if not \.System \}\}(.*?)\{\{ end \}\}",
        lambda found: "" if has_system else found[1],
        text,
        flags=re.DOTALL,
    )
    head, loop = text.split("{{ range .Messages }}")
    body = re.findall(
        r'\{\{ if eq \.Role "(\w+)" \}\}(.*?)\{\{ \.Content \}\}(.*?)\{\{ end \}\}', loop, flags=re.DOTALL
    )
    blocks = {role: (before, after) for role, before, after in body}
    parts = [f"{blocks[m['role']][0]}{m['content']}{blocks[m['role']][1]}" for m in messages]
    return head + "".join(parts) + loop.rpartition("{{ end }}")[2]


CONVERSATIONS = [
    [{"role": role, "content": f"{role}{index}"} for index, role in enumerate(roles)]
    for roles in (["user"], ["system", "user"], ["system", "user", "assistant", "user"])
]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML, LLAMA3], ids=["tiny", "chatml", "llama3"])
def test_a_template_of_blocks_is_rewritten(template):
    render = renderer(template)
    found = find_blocks(render)
    assert found is not None
    for messages in CONVERSATIONS:
        assert run_go_template(found.format(), messages) == render(messages, True)


@pytest.mark.parametrize(
    "template", [STRIPPING, MERGED_SYSTEM, "{{ messages[9].content }}"], ids=["trim", "merged", "error"]
)
def test_any_other_template_is_left_to_ollama(template):
    assert find_blocks(renderer(template)) is None


def test_a_modelfile():
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=20)
    text = format_modelfile("m.gguf", sampling, ["<|im_end|>", 'a"b'], find_blocks(renderer(CHATML)))
    lines = text.splitlines()
    assert lines[1] == "FROM ./m.gguf"
    assert lines[2].startswith('TEMPLATE """{{ if not .System }}<|im_start|>system')
    assert lines[-7:] == [
        'PARAMETER stop "<|im_end|>"',
        'PARAMETER stop "a\\"b"',
        "PARAMETER temperature 0.7",
        "PARAMETER top_p 0.9",
        "PARAMETER top_k 20",
        "PARAMETER min_p 0",
        "PARAMETER repeat_penalty 1",
    ]
    assert "TEMPLATE" not in format_modelfile("m.gguf", sampling, [], None)
    assert "ollama show --template" in format_modelfile("m.gguf", sampling, [], None)
