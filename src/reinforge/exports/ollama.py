"""An Ollama `Modelfile` beside a GGUF file: sampling as in training, the ends of a reply, and the template.

Ollama reads no Jinja. It knows templates of its own for a few families, and for any other model it sends the bare
prompt. So the template is rewritten in Ollama's language where it is a sequence of blocks, one a message:

    <|user|>2+3?<|end|><|assistant|>
    =>  {{ if eq .Role "user" }}<|user|>{{ .Content }}<|end|>{{ end }} ... <|assistant|>

The result is checked: rendered over several conversations it must give the text of the Jinja template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reinforge.config.blocks import SamplingConfig
from reinforge.types.request import Message

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages by the chat template; True: with the generation prompt."""

MARK = "\u241fcontent\u241f"
"""Stands for a message's content; no template writes it itself."""


@dataclass(frozen=True, slots=True)
class BlockTemplate:
    """A chat template that writes each message by itself."""

    start: str
    """Text before everything."""
    default: str
    """Text for a conversation without a system message, such as a default one."""
    blocks: dict[str, tuple[str, str]]
    """Role -> text before and after the content."""
    prompt: str
    """The generation prompt."""

    def render(self, messages: Sequence[Message]) -> str:
        has_system = any(message["role"] == "system" for message in messages)
        parts = [self.start, "" if has_system else self.default]
        for message in messages:
            before, after = self.blocks[message["role"]]
            parts += [before, message["content"], after]
        return "".join([*parts, self.prompt])

    def format(self) -> str:
        """Returns it in the language of Ollama's templates (Go's text/template)."""
        default = f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}" if self.default else ""
        branches = [
            f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ end }}}}'
            for role, (before, after) in self.blocks.items()
        ]
        return f"{self.start}{default}{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{self.prompt}"


def find_blocks(render: Render) -> BlockTemplate | None:
    """Returns a chat template as blocks; None: it is not a sequence of them, or Ollama's language cannot hold it."""
    try:
        found = _split(render)
        if found is None or any("{{" in part or '"""' in part for part in _list_texts(found)):
            return None
        conversations: list[list[Message]] = [
            [{"role": role, "content": f"{role} {index}\n {{}}"} for index, role in enumerate(roles)]
            for roles in (
                ("user",),
                ("system", "user"),
                ("user", "assistant", "user"),
                ("system", "user", "assistant", "user", "assistant", "user"),
            )
        ]
        return found if all(found.render(each) == render(each, True) for each in conversations) else None
    except Exception:  # noqa: BLE001  a template may raise anything, for example for a role that it does not know
        return None


def _split(render: Render) -> BlockTemplate | None:
    """Returns the blocks that the template shows in conversations of one to three messages."""
    user, system, reply = ({"role": role, "content": MARK} for role in ("user", "system", "assistant"))
    alone, prompted, pair = render([user], False), render([user], True), render([system, user], False)
    turns, longer = render([user, reply], False), render([user, reply, user], False)
    counts = [text.count(MARK) for text in (alone, pair, turns, longer)]
    if counts != [1, 2, 2, 3] or not prompted.startswith(alone) or not longer.startswith(turns):
        return None
    before, after_user = alone.split(MARK)
    _, before_reply, after_reply = turns.split(MARK)
    own = longer.removeprefix(turns).split(MARK)[0]
    before_system, between, _ = pair.split(MARK)
    opening = before.removesuffix(own)
    has_default = not before_system.startswith(opening)  # else it comes before a system message, too, as BOS does
    blocks = {
        "system": (before_system if has_default else before_system.removeprefix(opening), between.removesuffix(own)),
        "user": (own, after_user),
        "assistant": (before_reply.removeprefix(after_user), after_reply),
    }
    start, default = ("", opening) if has_default else (opening, "")
    return BlockTemplate(start, default, blocks, prompted.removeprefix(alone))


def _list_texts(found: BlockTemplate) -> list[str]:
    return [found.start, found.default, found.prompt, *(text for pair in found.blocks.values() for text in pair)]


def format_modelfile(file: str, sampling: SamplingConfig, ends: Sequence[str], template: BlockTemplate | None) -> str:
    """Returns a Modelfile for a GGUF file beside it; without a template, it says how to choose one."""
    lines = ["# ollama create NAME -f Modelfile", f"FROM ./{file}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template.format()}"""')
    else:
        lines += [
            "# The chat template cannot be written in Ollama's language. Ollama picks one by the model's family:",
            "# compare `ollama show --template NAME` with the file's chat template, or use llama-server --jinja.",
        ]
    lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in ends]
    values = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    lines += [f"PARAMETER {name} {value:g}" for name, value in {**values, "min_p": sampling.min_p}.items()]
    return "\n".join([*lines, "PARAMETER repeat_penalty 1", ""])
