"""Renders chat templates as transformers does, with limits on time and size.

A chat template is a program that comes with a model. Jinja's sandbox keeps it away from Python's internals, but lets it
loop for hours and build strings of any size. Here every operation that makes something large pays for it first:

    {{ 'x' * 10**10 }}                                    a product, a power, a format width, a filter with a width
    {% set ns.s = ns.s ~ ns.s %}                          a concatenation
    {% set ns.x = [ns.x, ns.x] %} ... {{ ns.x }}          a list that is short but long as text
    {% for ... %}{% for ... %}                            a step of a loop, a call of a macro
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from reinforge.bounded import TooDeepError, refuse_depth
from reinforge.engine.prompts import template_budget
from reinforge.limits import get_limits

AnyFunction = Callable[..., Any]
REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters for web pages, whose cost has no simple bound."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates: what transformers offers them, within a budget.

    Not safe to use from several threads at once.
    """

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension])
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _format_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: self._guard(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._count(cast("AnyFunction", function)) for name, function in self.tests.items()}
        self.begin({})

    def begin(self, values: Mapping[str, Any]) -> None:
        """Begins a rendering with a fresh budget."""
        self.budget = budget = template_budget.Budget(values)
        self.finalize = budget.spend_text
        self.filters |= {"_step": budget.step, "_container": budget.spend_container, "_join": budget.join}
        self.filters["_built"] = budget.spend_result

    def build_template(self, text: str) -> Template:
        """Returns a compiled template whose loops, macros and expressions pay for what they do."""
        tree = self.parse(text)
        for node in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
            num_chars = sum(len(written.data) for written in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_pay("_step", nodes.Const(None), num_chars)))  # type: ignore[attr-defined]
        _wrap_expressions(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (cost := template_budget.BINARY_COSTS.get(operator)) is not None:
            cost(self.budget, left, right)
        return self.budget.spend_result(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.step(num_chars=template_budget.CALL_CHARS)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int) and (cost := template_budget.METHOD_COSTS.get(name)) is not None:
            args = cost(budget, owner, *args, **kwargs) or args
        return budget.spend_result(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the sandbox's `str.format`, which pays for its result."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def format_within_budget(*args: Any, **kwargs: Any) -> str:
            template_budget.pay_for_format(self.budget, value.__self__, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return format_within_budget

    def _guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        num_passed = int(hasattr(function, "jinja_pass_arg"))
        cost = template_budget.FILTER_COSTS.get(name)

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step(num_chars=template_budget.CALL_CHARS)
            if cost is not None:
                changed = cost(self.budget, *args[num_passed:], **kwargs)
                args = args if changed is None else (*args[:num_passed], *changed)
            return self.budget.spend_result(function(*args, **kwargs))

        return guarded

    def _count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            return function(*args, **kwargs)

        return counted


class GenerationTag(Extension):
    """`{% generation %}`, which marks what the assistant wrote; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateDict:
    """`dict(...)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace(...)` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # it may hold itself


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _format_now(template: str) -> str:
    if len(template) > 256:
        raise template_budget.TemplateLimitReached("calls strftime_now with more than 256 characters")
    return datetime.now().strftime(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Returns JSON; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _pay(name: str, node: nodes.Expr, *numbers: int) -> nodes.Filter:
    return nodes.Filter(node, name, [nodes.Const(number) for number in numbers], [], None, None, lineno=node.lineno)


def _wrap_expressions(node: nodes.Node) -> None:
    """Makes expressions below a node pay: each list, tuple and mapping, each slice, `~` and comparison."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_wrap(entry) if isinstance(entry, nodes.Node) else entry for entry in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _wrap(value))


def _wrap(node: nodes.Node) -> nodes.Node:
    _wrap_expressions(node)
    if isinstance(node, nodes.Concat):
        return _pay("_join", nodes.List(node.nodes, lineno=node.lineno))
    if isinstance(node, nodes.Compare) and not all(_is_cheap(operand) for operand in node.ops):
        return _pay("_step", node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _pay("_built", node)
    is_value = getattr(node, "ctx", "load") == "load"  # not the target of an assignment
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and is_value and not _is_constant(node):
        return _pay("_container", node)
    return node


def _is_cheap(operand: nodes.Operand) -> bool:
    """Returns True if a comparison with this operand takes a time that only the template's text decides."""
    return _is_constant(operand.expr)


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_constant, node.items))
    )


class ChatTemplate:
    """A compiled chat template; threads may share it.

    Raises:
        TemplateLimitReached: It is too long.
        TemplateError: It is not Jinja.
    """

    def __init__(self, text: str):
        if len(text) > (most := get_limits().template_chars):
            raise template_budget.TemplateLimitReached(f"has {len(text)} characters, the limit is {most}")
        self._environment = ChatEnvironment()
        self._template: Template = self._environment.build_template(text)
        self._lock = threading.Lock()
        self._too_slow: str | None = None

    def render(self, values: Mapping[str, Any]) -> str:
        """Returns the text for some values, which must be plain data.

        Raises:
            TemplateLimitReached: It took too long or built too much.
            TemplateError: The template refused the values, or tried what the sandbox forbids.
        """
        with self._lock:
            if self._too_slow is not None:  # so that a run with such a template does not wait for it again and again
                raise template_budget.TemplateTooSlow(self._too_slow)
            self._environment.begin(values)
            try:
                text = "".join(self._template.root_render_func(self._template.new_context(dict(values))))
            except template_budget.TemplateTooSlow as error:
                self._too_slow = str(error)
                raise
            finally:
                self._environment.begin({})  # frees what the rendering built
        if len(text) > (most := get_limits().prompt_chars):
            raise template_budget.TemplateLimitReached(f"renders {len(text)} characters, the limit is {most}")
        return text


@lru_cache(maxsize=16)
def compile_chat_template(text: str) -> ChatTemplate:
    return ChatTemplate(text)


def find_template_problem(text: str, special_tokens: Mapping[str, str] | None = None) -> str | None:
    """Returns why a chat template cannot be used, as the rest of a sentence about it; None: nothing shows.

    It renders one short conversation. What else is wrong shows only with the messages that the template expects.

    Args:
        special_tokens: What the template may write by name, such as `bos_token`.
    """
    messages = [{"role": "user", "content": "hi"}]
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        with refuse_depth():
            compile_chat_template(text).render({**(special_tokens or {}), **values})
    except template_budget.TemplateLimitReached as error:
        return str(error)
    except TemplateSyntaxError as error:
        return f"is not valid Jinja: line {error.lineno}: {error.message}"
    except SecurityError as error:
        return f"tries what its sandbox forbids: {error}"
    except (TooDeepError, SyntaxError):
        return "is nested too deeply to be compiled"
    except Exception:  # noqa: BLE001  it may refuse this conversation with any error
        return None
    return None
