"""The system prompt that all requests share, and a chat template that leaves it out."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reinforge.errors import ConfigError
from reinforge.traces.system_prompts import find_shared_prompt, write_head

OWN = "{% for each in messages %}[{{ each.role }}: {{ each.content }}]{% endfor %}"


def build_rows(*prompts):
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return [{"messages": [{"role": "system", "content": each}, *asked] if each else asked} for each in prompts]


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        (["File the e-mail as JSON."] * 3, "File the e-mail as JSON."),
        (
            ["File the e-mail as JSON.\nToday: 3 May", "File the e-mail as JSON.\nToday: 4 May"],
            "File the e-mail as JSON.\nToday: ",
        ),
        (["You are a clerk here of Fernlea.", "You are a clerk here of Fern."], "You are a clerk here of "),
    ],
)
def test_what_system_prompts_share_ends_with_a_line_or_a_word(prompts, shared):
    assert find_shared_prompt(build_rows(*prompts)) == shared


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["File the e-mail as JSON.", None], "1 of 2 requests have no system prompt"),
        (["File the e-mail as JSON.", "Answer."], "the 2 different system prompts share the first 0 characters only"),
    ],
)
def test_requests_without_a_shared_prompt_are_refused(prompts, message):
    with pytest.raises(ConfigError, match=message):
        find_shared_prompt(build_rows(*prompts))


@pytest.mark.parametrize(
    "shared", ['You file "e-mails".\n{{ x }} {% raw %}', "Sé breve, <tool_call> 😀 \\ 'y' ${HOME}"]
)
def test_the_template_leaves_out_what_is_shared_and_nothing_else(shared):
    head = write_head(shared)
    assert "tool_call" not in head
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(head + OWN)

    def render(*texts):
        roles = ("system", "user", "assistant")
        messages = zip(roles, texts, strict=False)
        return template.render(
            messages=[{"role": role, "content": text} for role, text in messages if text is not None]
        )

    assert render(shared, "q", "a") == "[user: q][assistant: a]"
    assert render(f"{shared}Today: 3 May", "q") == "[system: Today: 3 May][user: q]"
    assert render("Another.", "q") == "[system: Another.][user: q]"
    assert render(None, shared) == f"[user: {shared}]"
