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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

from reinforge.errors import ConfigError, Problem, did_you_mean

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_ALIASES = 100
MAX_NODES = 100_000

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


SURROGATE = re.compile("[\ud800-\udfff]")


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
    _problems: list[tuple[tuple[int, int, int], Problem]] = field(default_factory=list)

    def report(self, path: KeyPath, message: str, fix: str = "", *, at: KeyPath | None = None) -> None:
        """Adds a problem at `path`; its position is that of `at` if the key is absent."""
        self.report_at(self.mark(path if at is None else at), Problem(format_path(path), message, fix))

    def report_at(self, mark: Mark | None, problem: Problem) -> None:
        if isinstance(mark, tuple):
            order, location = (0, *mark), f"{self.name}:{mark[0]}:{mark[1]}"
        else:
            order, location = (1, 0, 0), "-o" if mark == f"-o {problem.path}" else mark or self.name
        self._problems.append((order, Problem(problem.path, problem.message, problem.fix, location)))

    def has_problem(self, path: KeyPath) -> bool:
        return any(problem.path == format_path(path) for _, problem in self._problems)

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

    @property
    def problems(self) -> list[Problem]:
        """Every problem found so far, in the order of the file's lines."""
        return [problem for _, problem in sorted(self._problems, key=lambda pair: pair[0])]

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self.problems)


def parse_yaml(text: str, name: str = "") -> Document:
    """Returns the data of one YAML document; a `ConfigError` lists as many problems as possible."""
    document = Document(None, name)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        message = f"found more than {MAX_BYTES:,} bytes of YAML, the limit for a configuration"
        document.report((), message, "move the examples to a dataset file")
        document.raise_problems()
    loader = None
    try:
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
    except (ValueError, OverflowError):  # "\\U0FFFFFFF" names a character that Unicode does not have
        mark = _to_mark(loader.get_mark()) if loader is not None else None
        document.report_at(mark, Problem("", "not valid YAML: an escape names no character", "remove it"))
    document.raise_problems()
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


class _Loader(yaml.SafeLoader):
    """Parses nodes with YAML 1.2 scalars, and limits depth and aliases."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.num_aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.num_aliases += self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        if self.depth > MAX_DEPTH:
            raise _UnboundedYAML(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=mark)
        if self.num_aliases > MAX_ALIASES:
            raise _UnboundedYAML(problem=f"more than {MAX_ALIASES} aliases (*name)", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in RESOLVERS:
    _Loader.add_implicit_resolver(TAG + _tag, _pattern, _first)


SCALARS: dict[str, Callable[[str], Any]] = {
    TAG + "null": lambda text: None,
    TAG + "bool": lambda text: {"true": True, "false": False}[text.lower()],
    TAG + "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text),
    TAG + "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    TAG + "str": str,
}


def _is_merge(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None


class _Reader:
    """Turns nodes into plain data and records the position of each key."""

    def __init__(self, document: Document):
        self.document = document
        self.num_nodes = 0
        self.open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        """Returns the plain data of a node; an alias is read again wherever it is used."""
        self.num_nodes += 1
        mark = node.start_mark
        if self.num_nodes > MAX_NODES:
            raise _UnboundedYAML(problem=f"more than {MAX_NODES:,} values after expanding aliases", problem_mark=mark)
        if any(node is other for other in self.open):
            raise _UnboundedYAML(problem="an alias (*name) refers to a value that contains it", problem_mark=mark)
        if len(self.open) > MAX_DEPTH:
            raise _UnboundedYAML(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=mark)
        self.document.marks.setdefault(path, (mark.line + 1, mark.column + 1))
        self.open.append(node)
        value = self._value(node, path)
        self.open.pop()
        return value

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in SCALARS:
            try:
                return SCALARS[node.tag](self._read_text(node, path))
            except (ValueError, KeyError):
                self.document.report(path, f'"{node.value[:40]}" is not a valid !!{node.tag.removeprefix(TAG)}')
                return None
        tag = f"!!{node.tag.removeprefix(TAG)}" if node.tag.startswith(TAG) else node.tag
        message = f"the tag {tag} is not allowed: a configuration holds plain data, not objects"
        self.document.report_at(_to_mark(node.start_mark), Problem(format_path(path), message, "remove the tag"))
        return None

    def _read_text(self, node: yaml.ScalarNode, path: KeyPath) -> str:
        """Returns the text of a scalar; joins the halves of a character, as JSON writes it, and reports a lone half."""
        text = str(node.value)
        if SURROGATE.search(text) is None:
            return text
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        half = SURROGATE.search(joined)
        if half is not None:
            message = f"{half[0]!a} is an unpaired surrogate"
            problem = Problem(format_path(path), message, "write the character itself, or remove it")
            self.document.report_at(_to_mark(node.start_mark), problem)
        return SURROGATE.sub("\ufffd", joined)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in sorted(
            node.value, key=lambda pair: not _is_merge(pair[0])
        ):  # merges first, so that a mapping's own keys keep their marks
            mark = _to_mark(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                self.document.report_at(
                    mark, Problem(format_path(path), "keys must be strings, but this one is a mapping or a list")
                )
            elif _is_merge(key):
                merged = {**self._read_merge(value, path), **merged}
            elif (name := self._read_text(key, path)) in own:
                first = self.document.marks[(*path, name)]
                message = f'duplicate key "{name}"; it is already set on line {first[0]}'
                self.document.report_at(mark, Problem(format_path((*path, name)), message, "remove one of them"))
            else:
                self.document.marks[(*path, name)] = mark or ""
                own[name] = self.read(value, (*path, name))
        return {**merged, **own}

    def _read_merge(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        """Returns the mapping that `<<` adds; if there are several, earlier ones win."""
        merged: dict[str, Any] = {}
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(part, yaml.MappingNode):
                self.document.report_at(
                    _to_mark(part.start_mark), Problem(format_path(path), "<< takes a mapping or a list of mappings")
                )
                continue
            merged = {**self.read(part, path), **merged}
        return merged


PLACEHOLDER = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>(?:(?!\$\{)[^}])*))?\}|\$\{")


def expand(document: Document, environ: Mapping[str, str]) -> dict[KeyPath, str]:
    """Expands the variables in a document; returns the original text of each value that had one, by path.

    Example: `{"key": "${KEY:-none}"}` without KEY becomes `{"key": "none"}` and returns
    `{("key",): "${KEY:-none}"}`. A variable that is unset and has no default is reported as a problem.
    """
    raw: dict[KeyPath, str] = {}
    document.data = _expand(document.data, (), document, environ, raw)
    return raw


def escape(text: str) -> str:
    """Returns text that `expand` turns back into `text`: `${x}` -> `$${x}`."""
    return text.replace("${", "$${")


def _expand(value: Any, path: KeyPath, document: Document, environ: Mapping[str, str], raw: dict[KeyPath, str]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, (*path, key), document, environ, raw) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, (*path, index), document, environ, raw) for index, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if match[0] == "$${":
            return "${"
        raw[path] = value
        if name is None:
            excerpt = value[match.start() : match.start() + 20]
            document.report(
                path, f'"{excerpt}" is not a variable', "write ${NAME} or ${NAME:-default}; $${ is a literal ${"
            )
        elif match["default"] is not None:
            return environ.get(name) or match["default"]
        elif name in environ:
            return environ[name]
        else:
            message = f"the environment variable {name} is not set{did_you_mean(name, environ)}"
            document.report(path, message, f"export {name}=..., or write ${{{name}:-default}}")
        return ""

    return PLACEHOLDER.sub(replace, value)
