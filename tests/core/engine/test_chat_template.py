"""Chat templates: rendered as transformers does, kept from Python's internals, and limited in time and size."""

import threading
import time
import tracemalloc

import pytest

from reinforge.engine.prompts import template_budget, tokenization
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.engine.prompts.template_budget import Budget, TemplateLimitReached, TemplateTooSlow
from reinforge.engine.prompts.template_sandbox import ChatTemplate, find_template_problem
from reinforge.errors import ConfigError, EngineError
from reinforge.limits import Limits
from reinforge.types.request import ModelRequest
from tests.models import make_tokenizer

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 3?"}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": [3, "é"]}'}}
HISTORY = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "a sum"},
    {"role": "tool", "tool_call_id": "c", "name": "add", "content": "5"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "twice?"}]},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers & returns the sum.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}}},
        },
    }
]

LIKE_TRANSFORMERS = {
    "chatml": (
        "{% for m in messages %}\n{{- '<|im_start|>' ~ m['role'] + '\\n' -}}"
        "\n{{ m.content if m.content is string else m.content | map(attribute='text') | join('') }}"
        "{{ '<|im_end|>\\n' }}\n{% endfor %}\n{%- if add_generation_prompt %}A:{% endif %}"
    ),
    "namespace, macro, loop controls": (
        "{% macro show(x, label='') %}[{{ label }}{{ x | trim | upper }}]{% endmacro %}"
        "{% set ns = namespace(found=false, text='') %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% continue %}{% endif %}{% set ns.text = ns.text ~ m.role %}{% if loop.index0 > 2 %}"
        "{% set ns.found = true %}{% break %}{% endif %}{{ show(m.role, loop.index ~ '/' ~ loop.length) }}"
        "{% endfor %}{{ ns.text }} {{ ns.found }}"
    ),
    "tools as JSON": (
        "{% for t in tools or [] %}{{ t | tojson }}\n{{ t.function | tojson(indent=2) }}"
        "{{ t.function.parameters.properties.items() | list | length }}"
        "{% for k, v in t.function.parameters.properties | dictsort %}{{ k }}={{ v.type }}{% endfor %}{% endfor %}"
        "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
        "{{ c.function.arguments['b'][-1] }}{% endfor %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    ),
    "lists and slices": (
        "{% set rest = messages[1:] %}{% set all = [messages[0]] + rest %}{{ all | length }}"
        "{{ rest[::-1][0].role }}{% for a, b in [('x', 1), ('y', 2)] %}{{ a * 2 }}{{ b ** 2 % 3 }}{% endfor %}"
        "{{ {'a': 1, 'b': none}.items() | list }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ range(3) | list }}{{ 7 // 2 }}"
        " {{ 2.5 * 2 }}{{ '%s-%03d' % ('a', 7) }}{{ '{}:{:>5}'.format('b', 1) }}{{ 'a,b'.split(',') | join(';') }}"
        "{{ 'abc'.replace('b', 'xx') }}"
    ),
    "set blocks and generation": (
        "{% set head %}{{ bos_token }}{{ eos_token }}{% for m in messages %}.{% endfor %}{% endset %}{{ head * 2 }}"
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.role }}{{ x }}{% endgeneration %}{% endfor %}"
        "{{ x is defined }}{{ tools is none }}{{ missing | default('no') }}{{ 'A' in messages[0].content }}"
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    made = make_tokenizer()
    made.bos_token = "<|system|>"
    return made


@pytest.mark.parametrize("name", LIKE_TRANSFORMERS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_transformers_renders_it(tokenizer, name, tools, add_generation_prompt):
    tokenizer.chat_template = LIKE_TRANSFORMERS[name]
    request = ModelRequest(HISTORY, tools=tools, template_kwargs={"extra": 1})
    text = PromptRenderer(tokenizer)._render_text(request, HISTORY, add_generation_prompt=add_generation_prompt)
    parsed = {**CALL, "function": {"name": "add", "arguments": {"a": 2, "b": [3, "é"]}}}
    given = [{**message, "tool_calls": [parsed]} if "tool_calls" in message else message for message in HISTORY]
    assert text == tokenizer.apply_chat_template(
        given, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, extra=1
    )


TOO_LARGE = {
    "product": "{{ 'x' * 10**10 }}",
    "product of a list": "{{ ([1] * 10**10) | length }}",
    "power": "{{ 10 ** 10000000 }}",
    "powers": "{% set ns = namespace(x=9) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "width from a value": "{{ '%*d' % (10**9, 1) }}",
    "width of format": "{{ '{:1000000000d}'.format(1) }}",
    "width of format from a value": "{{ '{:{w}}'.format('a', w=10**9) }}",
    "width of the filter format": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(10**7) }}",
    "indent": "{{ ('\\n' * 10000) | indent(10**7) }}",
    "indented JSON": "{{ {'a': 1} | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "round": "{{ 1 | round(10**9, 'ceil') }}",
    "replace": "{% set s = 'a' * 10**5 %}{{ s.replace('a', s) | length }}",
    "the filter replace": "{% set s = 'a' * 10**5 %}{{ s | replace('a', s) | length }}",
    "join": "{% set s = 'a' * 10**5 %}{{ s.join(s) | length }}",
    "the filter join": "{% set s = 'a' * 10**5 %}{{ s | join(s) | length }}",
    "translate": "{% set s = 'a' * 10**5 %}{{ s.translate({97: s}) | length }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "sum of lists": "{{ ([[1]] * 10**4) | sum(start=[]) | length }}",
    "doubling with ~": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    ),
    "doubling with +": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    ),
    "doubling of lists": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    ),
    "doubling in a set block": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = t %}{% endfor %}"
    ),
    "doubling with a macro": (
        "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='x') %}{% for i in range(99) %}"
        "{% set ns.s = m(ns.s) %}{% endfor %}"
    ),
    "a list within itself": (
        "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
    ),
    "mappings within themselves": (
        "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}"
        "{{ ns.x | tojson }}"
    ),
    "two lists compared": (
        "{% set ns = namespace(x=1, y=1) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
    ),
    "slices": (
        "{% set s = 'a' * 10**5 %}{% set ns = namespace(x=[]) %}"
        "{% for i in range(999) %}{% set ns.x = ns.x + [s[i:]] %}{% endfor %}"
    ),
    "parts of a text": (
        "{% set s = 'a ' * 10**5 %}{% set ns = namespace(x=[]) %}"
        "{% for i in range(999) %}{% set ns.x = ns.x + [s.split()] %}{% endfor %}"
    ),
    "sets": (
        "{% set d = dict.fromkeys(range(99999), 1) %}{% set ns = namespace(x=[]) %}"
        "{% for i in range(999) %}{% set ns.x = ns.x + [d.keys() - []] %}{% endfor %}"
    ),
    "a chain of namespaces": (
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% set ns.x = namespace(x=ns.x) %}{% endfor %}{% endfor %}"
    ),
    "deep": "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "much text": "{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "much output": "{% for i in range(99999) %}{% for m in range(99999) %}{{ messages }}{% endfor %}{% endfor %}",
    "text in a macro": (
        "{% macro m() %}" + "x" * 1000 + "{% endmacro %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% set x = m() %}{% endfor %}{% endfor %}"
    ),
    "a long template": "x" * (Limits().template_chars + 1),
}
TOO_SLOW = {
    "nested loops": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
        "{% endfor %}"
    ),
    "a loop with a filter": "{% for a in range(99999) %}{% for b in range(99999) if a == -1 %}{% endfor %}{% endfor %}",
    "recursive macros": (
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": "{% for x in range(2) recursive %}{{ loop(range(2)) if loop.depth < 60 }}{% endfor %}",
    "long comparisons": (
        "{% set s = 'a' * 10**7 %}{% set t = ('a' * 9999999) ~ 'a' %}{% for i in range(99999) %}{% if s == t %}"
        "{% endif %}{% endfor %}"
    ),
    "long tests": "{% set s = 'a' * 10**7 %}{% for i in range(99999) %}{{ 'b' is in s }}{% endfor %}",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_template_that_builds_too_much_is_stopped_before_it_does(name, set_limit):
    set_limit("render_chars", 1 << 18)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitReached):
            ChatTemplate(TOO_LARGE[name]).render({"messages": ASKED})
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", TOO_SLOW)
def test_a_template_that_takes_too_long_is_stopped(name, monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_RENDER_CPU_S", 0.05)
    template = ChatTemplate(TOO_SLOW[name])
    started = time.thread_time()
    with pytest.raises(TemplateLimitReached, match=r"takes more than 0.05 s of CPU time"):
        template.render({"messages": ASKED})
    assert time.thread_time() - started < 10


def test_a_template_that_was_too_slow_once_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_RENDER_CPU_S", 0.05)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages[0].content == 'slow' %}" + loops + "{% endif %}done")
    assert template.render({"messages": [{"content": "fast"}]}) == "done"
    for _ in range(2):
        with pytest.raises(TemplateTooSlow, match=r"takes more than 0.05 s of CPU time"):
            template.render({"messages": [{"content": "slow"}]})
        monkeypatch.setattr(Budget, "step", lambda *_: pytest.fail("it was rendered again"))


def test_a_template_that_builds_too_much_once_is_tried_again(set_limit):
    set_limit("render_chars", 1000)
    template = ChatTemplate("{{ 'x' * messages[0].content | int }}")
    with pytest.raises(TemplateLimitReached):
        template.render({"messages": [{"content": "99999"}]})
    assert template.render({"messages": [{"content": "3"}]}) == "xxx"


def test_without_the_budget_the_same_templates_would_go_on(monkeypatch):
    """Mutation check: with loops that pay nothing, a template runs as long as it likes."""
    monkeypatch.setattr(template_budget, "MAX_RENDER_CPU_S", 0.01)
    loops = "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}done"
    with pytest.raises(TemplateLimitReached):
        ChatTemplate(loops).render({})
    monkeypatch.setattr(Budget, "step", lambda budget, value=None, num_chars=0: value)
    assert ChatTemplate(loops).render({}) == "done"


def test_a_long_conversation_may_build_more(set_limit):
    set_limit("render_chars", 1000)
    repeated = "{% for i in range(50) %}{{ messages[0].content }}{% endfor %}"
    text = "x" * 5000
    assert ChatTemplate(repeated).render({"messages": [{"content": text}]}) == text * 50
    with pytest.raises(TemplateLimitReached, match="and 128 for each one of the messages"):
        ChatTemplate(repeated.replace("50", "500")).render({"messages": [{"content": text}]})


def test_a_prompt_may_have_so_many_characters(set_limit):
    set_limit("prompt_chars", 100)
    assert ChatTemplate("{{ 'x' * 100 }}").render({}) == "x" * 100
    with pytest.raises(TemplateLimitReached, match="renders 101 characters, the limit is 100"):
        ChatTemplate("{{ 'x' * 101 }}").render({})


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__['__globals__'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__ }}{{ dict.__class__.__base__ }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ (messages | map(attribute='__class__') | first).mro }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
        "{{ strftime_now.__code__.co_code }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.clear() }}",
        "{{ 'a' | pprint }}",
        "{{ lipsum() }}",
    ],
)
def test_a_template_reaches_nothing_outside(text, tokenizer):
    tokenizer.chat_template = text
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(EngineError, match="cannot render the chat template"):
        PromptRenderer(tokenizer).render(ModelRequest(messages))
    assert messages == [{"role": "user", "content": "x"}]


def test_the_methods_of_other_objects_are_out_of_reach(tokenizer):
    class Image:
        def save(self):
            raise AssertionError("a template called a method of an object")

    tokenizer.chat_template = "{{ messages[0].image }}{{ messages[0].image.save() }}"
    with pytest.raises(EngineError, match="has no attribute 'save'"):
        PromptRenderer(tokenizer).render(ModelRequest([{"role": "user", "content": "x", "image": Image()}]))


def test_several_threads_may_render_at_once(tokenizer):
    tokenizer.chat_template = "{% for i in range(300) %}{{ messages[0].content }}{% endfor %}"
    renderer, texts = PromptRenderer(tokenizer), {}

    def render(name):
        request = ModelRequest([{"role": "user", "content": name}])
        for _ in range(20):
            texts.setdefault(name, set()).add(
                renderer._render_text(request, request.messages, add_generation_prompt=True)
            )

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {name: {name * 300} for name in "abcd"}


def test_the_cache_of_prompts_and_replies_is_bounded_in_characters_and_tokens(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenization, "CACHED_CHARS", 1000)
    tokenizer.chat_template = "{{ messages[0].content[:9] }}"  # a short prompt, whose key has the whole message
    renderer = PromptRenderer(tokenizer)
    first, second = (ModelRequest([{"role": "user", "content": letter * 900}]) for letter in "ab")
    prompt = renderer.render(first)
    assert renderer.render(first) is prompt, "it is cached"
    renderer.render(second)
    assert renderer.render(first) is not prompt, "both together are too long"
    for count, is_cached in ((512, True), (513, False)):
        assert (renderer.decode([9] * count) is renderer.decode([9] * count)) == is_cached


def test_a_template_that_ignores_tools_refuses_them_with_the_fix(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    renderer = PromptRenderer(tokenizer)
    assert renderer.render(ModelRequest(ASKED))
    with pytest.raises(ConfigError, match="ignores tools, but the agent passes some") as found:
        renderer.render(ModelRequest(ASKED, tools=TOOLS))
    (problem,) = found.value.problems
    assert problem.path == "finetuning.policy.chat_template"
    assert "set a template that renders `tools`" in problem.fix


def test_a_template_that_renders_tools_gets_them(tokenizer):
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    renderer = PromptRenderer(tokenizer)
    assert "Adds <two>" in tokenizer.decode(renderer.render(ModelRequest(ASKED, tools=TOOLS)))
    tokenizer.chat_template = "{{ tools[0].function.name }}"  # nothing without them
    assert tokenizer.decode(PromptRenderer(tokenizer).render(ModelRequest(ASKED, tools=TOOLS))) == "add"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}",
            "builds more than",
        ),
        ("{% for m in messages %}{{ m.content }}", "is not valid Jinja: line 1: Unexpected end of template"),
        ("{{ cycler.__init__.__globals__.os }}", "tries what its sandbox forbids: access to attribute '__init__'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is nested too deeply to be compiled"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{{ raise_exception('no system message') }}", None),
        ("{{ messages[7].content.strip() }}", None),
    ],
)
def test_what_makes_a_template_unusable_is_found_before_work_starts(text, problem):
    found = find_template_problem(text)
    assert (found is None) == (problem is None), found
    assert (problem or "") in (found or "")


def test_half_of_a_surrogate_pair_in_a_prompt_is_told_as_that(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"an unpaired surrogate \(U\+D800\) at character 1"):
        PromptRenderer(tokenizer).render(ModelRequest([{"role": "user", "content": "a\ud800b"}]))


ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }} {% elif m.role == 'user' %}U:{{ m.content }} "
    "{% endif %}{% endfor %}"
)
DEVELOPED = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "2 + 3?"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (ROLES, "S:be brief U:2 + 3? "),
        (ROLES.replace("'system'", "'developer'"), "S:be brief U:2 + 3? "),
        ("{% for m in messages %}{{ m.role }} {% endfor %}", "system user "),
        ('{% if messages[0].role == "developer" %}{{ messages[0].role }}{% endif %}', "developer"),
    ],
)
def test_a_developers_message_is_a_system_message_where_the_template_knows_no_developer(tokenizer, template, text):
    tokenizer.chat_template = template
    assert tokenizer.decode(PromptRenderer(tokenizer).render(ModelRequest(DEVELOPED))) == text
    assert DEVELOPED[0]["role"] == "developer"


def test_a_prompt_shows_the_keys_of_tools_in_their_order_whatever_came_before(tokenizer):
    """`tojson` writes keys as they come: one cached prompt for both would make a run depend on who asks first."""
    tokenizer.chat_template = "{{ tools | tojson }}"
    renderer = PromptRenderer(tokenizer)
    tools = [[{"a": 1, "b": 2}], [{"b": 2, "a": 1}]]
    texts = [tokenizer.decode(renderer.render(ModelRequest(DEVELOPED, tools=each))) for each in tools]
    assert texts == ['[{"a": 1, "b": 2}]', '[{"b": 2, "a": 1}]']
