"""A configuration as written: plain data, the position of every key, and the problems found so far.

    llms:                      data   {"llms": {"gpt": {"model_name": "gpt-4"}}}
      gpt:                     marks  ("llms",) -> (1, 1), ("llms", "gpt") -> (2, 3),
        model_name: gpt-4             ("llms", "gpt", "model_name") -> (3, 5)

Scalars follow YAML 1.2: `1e-5` is a number; `on`, `off`, `yes`, `no` and dates are text; `0o17` is 15.
Keys are always text. `<<` merges a mapping: YAML 1.2 dropped it, but people still write it.
Rejected: duplicate keys, custom tags (`!!python/object`), and files that expand without bound.

`${VAR}` and `${VAR:-default}` are expanded after the YAML is parsed, and only inside text values; `$${` stands for a
literal `${`. The contents of a variable therefore cannot become a key or change a type: `seed: ${SEED}` is text until
the schema asks for a number.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import yaml
from yaml.composer import Composer
from yaml.resolver import Resolver

try:
    from yaml._yaml import CParser
except ImportError:  # PyYAML was built without libyaml
    CParser = None  # type: ignore[assignment, misc]

from reinforge.bounded import encode_any, find_surrogate, join_surrogates
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.limits import get_limits
from reinforge.safe_text import is_secret_variable

KeyPath = tuple[str | int, ...]
Mark = tuple[int, int] | str
"""Line and column, counted from 1, or text such as `-o finetuning.seed` for a value that is in no file."""

TAG = "tag:yaml.org,2002:"
RESOLVERS = (  # the core schema of YAML 1.2, section 10.3.2: tag, pattern, first characters
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), [*"~nN", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
)


def format_path(path: KeyPath) -> str:
    """Returns a path as it is written in messages and after `-o`: `("a", 0, "b")` -> `a.0.b`."""
    return ".".join(map(str, path))


ABSENT = object()


def get_child(value: Any, key: str | int) -> Any:
    """Returns the value at a key of a mapping or an index of a list; `ABSENT` if there is none."""
    if isinstance(value, dict):
        return value.get(key, ABSENT)
    if isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
        return value[key]
    return ABSENT


@dataclass
class Document:
    """Plain data with the position of every key; `name` is the file, empty for data from Python."""

    data: Any
    name: str = ""
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    placeholders: dict[KeyPath, str] = field(default_factory=dict)  # text with `${VAR}` as it was written, by path
    problems: list[Problem] = field(default_factory=list)
    """Every problem found so far, in the order of the file's lines."""
    _order: dict[Problem, tuple[int, int, int]] = field(default_factory=dict)

    def report(self, path: KeyPath, message: str, fix: str = "", *, at: KeyPath | None = None) -> None:
        """Adds a problem at `path`; its position is that of `at` if the key is absent."""
        self.report_at(self.mark(path if at is None else at), Problem(format_path(path), message, fix))

    def report_at(self, mark: Mark | None, problem: Problem) -> None:
        if isinstance(mark, tuple):
            order, location = (0, *mark), f"{self.name}:{mark[0]}:{mark[1]}"
        else:
            order, location = (1, 0, 0), "-o" if mark == f"-o {problem.path}" else mark or self.name
        problem = replace(problem, location=location)
        self._order[problem] = order
        insort(self.problems, problem, key=self._order.__getitem__)

    def mark(self, path: KeyPath) -> Mark | None:
        """Returns the position of a path, or of the nearest path above it that has one."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return None

    def get(self, path: KeyPath) -> Any:
        """Returns the value at a path, or None if there is none."""
        value = self.data
        for key in path:
            value = get_child(value, key)
        return None if value is ABSENT else value

    def get_block(self, path: KeyPath) -> dict[str, Any]:
        """Returns the mapping at a path, empty if there is none."""
        value = self.data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else {}

    def has_problem(self, path: KeyPath) -> bool:
        return any(problem.path == format_path(path) for problem in self.problems)

    def move(self, path: KeyPath, new_path: KeyPath | None) -> None:
        """Moves what is known of a path and of those below it; None: removes it."""
        tables: tuple[dict[KeyPath, Any], ...] = (self.marks, self.placeholders)
        for table in tables:
            for known in [known for known in table if known[: len(path)] == path]:
                entry = table.pop(known)
                if new_path is not None:
                    table[(*new_path, *known[len(path) :])] = entry


def parse_yaml(content: str | bytes, name: str = "") -> Document:
    """Returns the data of one YAML document; a `ConfigError` lists as many problems as possible."""
    document = Document(None, name)
    size = len(content if isinstance(content, bytes) else encode_any(content))
    if size > (most := get_limits().config_bytes):
        message = f"found more than {most:,} bytes of YAML, the limit for a configuration"
        document.report((), message, "move the examples to a dataset file")
        raise ConfigError(document.problems)
    text, loader, node = "", None, None
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        if CParser is not None and not READ_OTHERWISE.search(text):
            with suppress(yaml.YAMLError, ValueError, OverflowError):  # PyYAML's own parser says what is wrong
                node = _FastComposer(CParser(text)).get_single_node()
        if node is None or isinstance(node, yaml.ScalarNode):  # they place that of `---` without a line break otherwise
            loader = _Loader(text)
            node = loader.get_single_node()
        if node is not None:
            document.data = _Reader(document).read(node, ())
    except yaml.MarkedYAMLError as error:
        document.report_at(_to_mark(error.problem_mark or error.context_mark), _build_problem(error))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character {chr(error.character)!r} is not allowed in YAML"
        document.report_at((line, 1), Problem("", message, "remove it"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        document.report_at(f"{name}:{line}", Problem("", "the file is not UTF-8", "save it as UTF-8"))
    except (ValueError, OverflowError):  # "\\U0FFFFFFF" names a character that Unicode does not have
        mark = _to_mark(loader.get_mark()) if loader is not None else None
        document.report_at(mark, Problem("", "not valid YAML: an escape names no character", "remove it"))
    if document.problems:
        raise ConfigError(document.problems)
    return document


def _to_mark(mark: yaml.Mark | None) -> Mark | None:
    return (mark.line + 1, mark.column + 1) if mark else None


def _build_problem(error: yaml.MarkedYAMLError) -> Problem:
    if isinstance(error, _UnboundedYAML):
        return Problem("", str(error.problem))
    text = ", ".join(part for part in (error.context, error.problem) if part)
    fix = ""
    if "'\\t'" in text:
        fix = "indent with spaces, not tabs"
    elif "mapping values are not allowed" in text:
        fix = "check the indentation, and put text that contains ': ' in quotes"
    elif "flow" in text:
        fix = 'close every [ and {, and inside them put ${VAR} in quotes: "${VAR}"'
    return Problem("", f"not valid YAML: {text}", fix)


class _UnboundedYAML(yaml.MarkedYAMLError):
    """A file that expands without bound."""


class _Composer(Composer, Resolver):
    """Makes nodes with YAML 1.2 scalars from the events of a parser, and limits depth and aliases."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]
    check_event: Callable[..., bool]
    peek_event: Callable[[], Any]
    get_event: Callable[[], Any]
    depth = 0
    num_aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.num_aliases += self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        if self.depth > (most := get_limits().config_depth):
            raise _UnboundedYAML(problem=f"nested deeper than {most} levels", problem_mark=mark)
        if self.num_aliases > (most := get_limits().config_aliases):
            raise _UnboundedYAML(problem=f"more than {most} aliases (*name)", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in RESOLVERS:
    _Composer.add_implicit_resolver(TAG + _tag, _pattern, _first)


class _Loader(_Composer, yaml.SafeLoader):
    """Reads events with PyYAML's own parser."""


class _FastComposer(_Composer):
    """Reads events with libyaml, in a tenth of the time."""

    def __init__(self, parser: CParser):
        Composer.__init__(self)
        Resolver.__init__(self)
        self.check_event, self.peek_event, self.get_event = parser.check_event, parser.peek_event, parser.get_event


READ_OTHERWISE = re.compile(r"[\t\ufeff?]|[|>]#|(?:^|[\s\[{,])!")
"""What libyaml and PyYAML may read differently: tabs, byte order marks, `{a: b?c}`, a comment right after `|`, tags."""


SCALARS: dict[str, Callable[[str], Any]] = {
    TAG + "null": lambda text: None,
    TAG + "bool": lambda text: {"true": True, "false": False}[text.lower()],
    TAG + "int": lambda text: int(str(int(text, 0)) if text[:2] in ("0o", "0x") else text),  # one that can be printed
    TAG + "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    TAG + "str": str,
}


@dataclass
class _Reader:
    """Turns nodes into plain data and records the position of each key."""

    document: Document
    num_nodes: int = 0
    open: list[yaml.Node] = field(default_factory=list)

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        """Returns the plain data of a node; an alias is read again wherever it is used."""
        self.num_nodes += 1
        mark = node.start_mark
        if self.num_nodes > (most := get_limits().config_values):
            raise _UnboundedYAML(problem=f"more than {most:,} values after expanding aliases", problem_mark=mark)
        if any(node is other for other in self.open):
            raise _UnboundedYAML(problem="an alias (*name) refers to a value that contains it", problem_mark=mark)
        if len(self.open) > (most := get_limits().config_depth):
            raise _UnboundedYAML(problem=f"nested deeper than {most} levels", problem_mark=mark)
        self.document.marks.setdefault(path, (mark.line + 1, mark.column + 1))
        self.open.append(node)
        value: Any = None
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            value = self._read_mapping(node, path)
        elif isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            value = [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            try:
                value = _read_scalar(node)
            except _Unreadable as error:
                self.document.report_at(_to_mark(mark), Problem(format_path(path), *error.args))
        self.open.pop()
        return value

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in sorted(node.value, key=lambda pair: not _is_merge(pair[0])):
            # merges come first, so that a mapping's own keys keep their marks
            mark, problem = _to_mark(key.start_mark), None
            try:
                name = _read_key(key)
            except _Unreadable as error:
                problem = Problem(format_path(path), *error.args)
            else:
                if _is_merge(key):
                    merged = {**self._read_merge(value, path), **merged}
                elif name in own:
                    line = self.document.marks[(*path, name)][0]
                    message = f'duplicate key "{name}"; it is already set on line {line}'
                    problem = Problem(format_path((*path, name)), message, "remove one of them")
                else:
                    self.document.marks[(*path, name)] = mark or ""
                    own[name] = self.read(value, (*path, name))
            if problem is not None:
                self.document.report_at(mark, problem)
        return {**merged, **own}

    def _read_merge(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        """Returns the mapping that `<<` adds; if there are several, earlier ones win."""
        merged: dict[str, Any] = {}
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(part, yaml.MappingNode):
                merged = {**self.read(part, path), **merged}
            else:
                problem = Problem(format_path(path), "<< takes a mapping or a list of mappings")
                self.document.report_at(_to_mark(part.start_mark), problem)
        return merged


class _Unreadable(ValueError):
    """A scalar or a key that is not plain data; its arguments are the message and the fix."""


def _is_merge(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and not key.style


def _read_key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Unreadable("keys must be strings, but this one is a mapping or a list")
    return _join_halves(node.value)


def _read_scalar(node: yaml.Node) -> Any:
    """Returns the value of a scalar; any node with a tag of something else is refused."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in SCALARS:
        tag = f"!!{node.tag.removeprefix(TAG)}" if node.tag.startswith(TAG) else node.tag
        message = f"the tag {tag} is not allowed: a configuration holds plain data, not objects"
        raise _Unreadable(message, "remove the tag")
    text = _join_halves(node.value)
    try:
        return SCALARS[node.tag](text)
    except (ValueError, KeyError):
        raise _Unreadable(f'"{text[:40]}" is not a valid !!{node.tag.removeprefix(TAG)}') from None


def _join_halves(text: str) -> str:
    """Returns text with the halves of a character joined, as JSON writes it; a lone half is refused."""
    joined = join_surrogates(text)
    if (half := find_surrogate(joined)) is not None:
        raise _Unreadable(f"{joined[half]!a} is an unpaired surrogate", "write the character itself, or remove it")
    return joined


def apply_override(document: Document, path_text: str, value_text: str) -> None:
    """Sets the value at `a.b.0` (keys and indices) to a YAML value; the schema check finds unknown paths."""
    mark = f"-o {path_text}"
    keys: list[str | int] = list(path_text.split("."))
    if not all(keys):
        fix = "join the keys with single dots, for example: -o finetuning.num_epochs 5"
        document.report_at(mark, Problem("", f'"{path_text}" is not a path', fix))
        return
    try:
        value = parse_yaml(value_text).data
    except ConfigError as error:
        for problem in error.problems:
            fix = "quote the value twice, for the shell and for YAML: -o PATH '\"text\"'"
            document.report_at(mark, Problem(path_text, problem.message, fix))
        return
    container: Any = document.data
    for depth, key in enumerate(keys):
        above: KeyPath = tuple(keys[:depth])
        if isinstance(container, list):
            if not str(key).isdigit() or int(key) >= len(container):
                allowed = f"0 to {len(container) - 1}" if container else "none, since the list is empty"
                message = f'"{key}" is not an index of this list; allowed: {allowed}'
                document.report_at(mark, Problem(path_text, message))
                return
            key = keys[depth] = int(key)
        elif not isinstance(container, dict):
            message = f"{format_path(above)} is a single value and has no keys"
            document.report_at(mark, Problem(path_text, message))
            return
        if depth == len(keys) - 1:
            container[key] = value
            break
        if isinstance(container, dict) and container.get(str(key)) is None:
            container[key] = {}
            document.marks[*above, key] = mark
        container = container[key]
    document.move(tuple(keys), None)
    document.marks[tuple(keys)] = mark


PLACEHOLDER = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>(?:(?!\$\{)[^}])*))?\}|\$\{")


def escape(text: str) -> str:
    """Returns text that `expand` turns back into `text`: `${x}` -> `$${x}`."""
    return text.replace("${", "$${")


def expand(document: Document, environ: Mapping[str, str], value: Any, path: KeyPath = ()) -> Any:
    """Returns part of a document with its variables expanded; the document keeps the text that had one, by path.

    Example: `{"key": "${KEY:-none}"}` without KEY becomes `{"key": "none"}`, and the document's `placeholders`
    `{("key",): "${KEY:-none}"}`. A variable that is unset and has no default is reported as a problem, and a secret in
    a URL: that ends up in logs, and in those of the server.
    """
    if isinstance(value, dict):
        return {key: expand(document, environ, item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(document, environ, item, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    secrets = []

    def substitute(match: re.Match[str]) -> str:
        name = match["name"]
        if match[0] == "$${":
            return "${"
        document.placeholders[path] = value
        if name is None:
            excerpt = value[match.start() : match.start() + 20]
            fix = "write ${NAME} or ${NAME:-default}; $${ is a literal ${"
            document.report(path, f'"{excerpt}" is not a variable', fix)
            return ""
        if is_secret_variable(name):
            secrets.append(name)
        if match["default"] is not None:
            return environ.get(name) or match["default"]
        if name not in environ:
            message = f"the environment variable {name} is not set{did_you_mean(name, environ)}"
            document.report(path, message, f"export {name}=..., or write ${{{name}:-default}}")
        return environ.get(name, "")

    expanded = PLACEHOLDER.sub(substitute, value)
    for name in secrets if "://" in expanded else ():
        message = f"the secret {name} is part of a URL, which would end up in logs"
        document.report(path, message, f"use api_key: ${{{name}}}, which is sent as a header")
    return expanded
