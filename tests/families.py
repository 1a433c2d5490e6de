"""Random dialogues in the formats of model families: Unicode, nested arguments, parallel calls, look-alikes of tokens.

The templates in `tests/data/templates` are minimal ones in each family's format.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from reinforge.dialects.families.family import ToolFormat

FOLDER = Path(__file__).parent / "data" / "templates"
LETTERS = (
    "abcdefghijklmnopqrstuvwxyz .,!?",
    "äöüßéñçøåĳ ",
    "a\u0301e\u0308\u200d\ufe0f\u00ad",
    "日本語中文한국어",
    "שלוםمرحبا\u202e",
    "👩👨👧🏽\u200d🏳️🌈",
    "\t\n\r\u00a0\u2028\x00\x1b\ufffd",
    "{}[]()\":,\\<>/|'`=;",
    "𝔘𝔫𝔦𓀀\U0010ffff",
)
LOOKALIKES = (
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "<|im_end|>", "<think>", "</think>",
    "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>", "; ", "<function=f>", "</function>",
    "<parameter=a>", "</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>",
    "<|/tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "[f(a=1)]", "```json", "\n```",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>",
    "<|start|>assistant", '<|"|>', "<escape>", "<|tool_call>", "<tool_call|>", "<|channel>thought", "<channel|>",
    "<start_function_call>", "<end_function_call>", "True", "null", "5", "-1.5e3", "\\u0041", "\\ud800", "\\n",
    "{{ messages }}", "{% raw %}", "<0xE2>", "▁",
)  # fmt: skip
KINDS = ("string", "integer", "number", "boolean", "array", "object", "null")


@dataclass(frozen=True)
class FamilySpec:
    """What the model of a family can write.

    Attributes:
        template: File of its template.
        tool_format: Its format.
        end: The token that ends a reply.
        markers: Texts that mean something to the family, so that plain text cannot have them.
        value_markers: Texts that no value can have.
        reasons: It writes reasoning.
        mixes: It writes text before calls.
        parallel: It writes several calls.
        plain_keys: Keys of nested objects have no quotes.
    """

    template: str
    tool_format: ToolFormat
    end: str
    markers: tuple[str, ...]
    value_markers: tuple[str, ...] = ()
    reasons: bool = False
    mixes: bool = True
    parallel: bool = True
    plain_keys: bool = False

    @property
    def text(self) -> str:
        return (FOLDER / f"{self.template}.jinja").read_text(encoding="utf-8")


THINK = ("<think>", "</think>")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
SPECS = {
    spec.template: spec
    for spec in (
        FamilySpec("hermes", ToolFormat.HERMES, "<|im_end|>", ("<tool_call>", *THINK), reasons=True),
        FamilySpec(
            "qwen_xml", ToolFormat.QWEN_XML, "<|im_end|>", ("<tool_call>", "<function=", *THINK),
            ("<parameter=", "</function>"), reasons=True,
        ),
        FamilySpec("llama3", ToolFormat.LLAMA3, "<|eot_id|>", ("<|python_tag|>", '{"name"'), mixes=False),
        FamilySpec("mistral_list", ToolFormat.MISTRAL, "</s>", ("[TOOL_CALLS]",), mixes=False),
        FamilySpec("mistral", ToolFormat.MISTRAL, "</s>", ("[TOOL_CALLS]", "[THINK]", "[/THINK]"), reasons=True),
        FamilySpec(
            "gemma", ToolFormat.GEMMA, "<turn|>", ("<|tool_call>", "<|channel>thought", "<channel|>"), ('<|"|>',),
            reasons=True, plain_keys=True,
        ),
        FamilySpec(
            "function_gemma", ToolFormat.FUNCTION_GEMMA, "<end_of_turn>", ("<start_function_call>",), ("<escape>",),
            plain_keys=True,
        ),
        FamilySpec("gemma3", ToolFormat.PYTHONIC, "<end_of_turn>", ("[f(", "```"), mixes=False),
        FamilySpec(
            "glm", ToolFormat.GLM, "<|user|>", ("<tool_call>", *THINK), ("<arg_key>", "</tool_call>"), reasons=True
        ),
        FamilySpec("lfm2", ToolFormat.LFM2, "<|im_end|>", ("<|tool_call_start|>", *THINK), reasons=True),
        FamilySpec("granite", ToolFormat.GRANITE, "<|end_of_text|>", ("<|tool_call|>",)),
        FamilySpec("phi4", ToolFormat.GRANITE, "<|end|>", ("<|tool_call|>",)),
        FamilySpec(
            "deepseek_v3", ToolFormat.DEEPSEEK, "<｜end▁of▁sentence｜>", ("<｜tool▁calls▁begin｜>", *THINK),
            reasons=True,
        ),
        FamilySpec("deepseek_v31", ToolFormat.DEEPSEEK, "<｜end▁of▁sentence｜>", ("<｜tool▁calls▁begin｜>", *THINK)),
        FamilySpec(
            "harmony", ToolFormat.HARMONY, "<|return|>", HARMONY, reasons=True, mixes=True, parallel=False
        ),
    )
}  # fmt: skip


class DialogueMaker:
    """Makes the dialogues of one family; equal seeds make equal dialogues."""

    def __init__(self, spec: FamilySpec, seed: object):
        self.spec, self.rng = spec, random.Random(f"{spec.template}-{seed}")

    def make_text(self, forbidden: tuple[str, ...] = (), limit: int = 30) -> str:
        """Returns text of one to three scripts, sometimes with text that looks like a special token."""
        rng = self.rng
        letters = "".join(rng.sample(LETTERS, rng.randint(1, 3)))
        while True:
            text = "".join(rng.choice(letters) for _ in range(rng.randint(0, limit)))
            if rng.random() < 0.3:
                place = rng.randint(0, len(text))
                text = text[:place] + rng.choice(LOOKALIKES) + text[place:]
            if not any(marker in text for marker in (*forbidden, self.spec.end)):
                return text

    def make_plain(self) -> str:
        """Returns text that is no call and no reasoning, without white space around it."""
        return self.make_text(self.spec.markers).strip()

    def make_name(self) -> str:
        return self.rng.choice("abcdefgh") + "".join(self.rng.choice("abc_019") for _ in range(self.rng.randint(0, 8)))

    def make_value(self, kind: str, depth: int = 0) -> object:
        """Returns a value of a JSON type."""
        rng = self.rng
        if kind == "string":
            return self.make_text(self.spec.value_markers)
        if kind == "integer":
            return rng.choice((0, -1, 7, 2**53 + 1, -(10**30), rng.randint(-999, 999)))
        if kind == "number":
            return rng.choice((0.0, -1.5, 1e-7, 1e22, 2.5e-300, rng.random()))
        if kind in ("boolean", "null"):
            return rng.random() < 0.5 if kind == "boolean" else None
        inner = KINDS[:4] if depth > 3 else KINDS
        values = [self.make_value(rng.choice(inner), depth + 1) for _ in range(rng.randint(0, 3))]
        if kind == "array":
            return values
        make_key = self.make_name if self.spec.plain_keys else lambda: self.make_text(self.spec.value_markers, 8)
        made = {make_key(): value for value in values}
        return dict(sorted(made.items())) if self.spec.plain_keys else made  # its template sorts them

    def make_tools(self) -> list[dict]:
        """Returns one to three function definitions."""
        tools = []
        for name in {self.make_name() for _ in range(self.rng.randint(1, 3))}:
            properties = {self.make_name(): {"type": self.rng.choice(KINDS)} for _ in range(self.rng.randint(0, 4))}
            schema = {"type": "object", "properties": properties, "required": sorted(properties)}
            tools.append({"type": "function", "function": {"name": name, "description": "", "parameters": schema}})
        return sorted(tools, key=lambda tool: tool["function"]["name"])

    def make_reply(self, tools: list[dict]) -> dict:
        """Returns an assistant message, with calls of these tools or without."""
        rng, spec = self.rng, self.spec
        message = {"role": "assistant", "content": self.make_plain()}
        if spec.reasons and rng.random() < 0.6:
            message["reasoning_content"] = self.make_plain() or "so"
        if rng.random() < 0.65:
            if not spec.mixes or rng.random() < 0.5 or not message["content"]:
                message["content"] = None
            message["tool_calls"] = [
                self._make_call(rng.choice(tools)["function"]) for _ in range(rng.randint(1, 3 if spec.parallel else 1))
            ]
        return message

    def _make_call(self, function: dict) -> dict:
        properties = function["parameters"]["properties"]
        arguments = {key: self.make_value(schema["type"]) for key, schema in properties.items()}
        if self.spec.plain_keys:
            arguments = dict(sorted(arguments.items()))
        text = json.dumps(arguments, ensure_ascii=False)
        call_id = f"{self.rng.randrange(10**9):09d}"
        return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": text}}

    def make_dialogue(self) -> tuple[list[dict], list[dict]]:
        """Returns the tools and the messages of a dialogue of one to three replies, the last message a reply."""
        tools, messages = self.make_tools(), [{"role": "user", "content": self.make_text()}]
        for turn in range(self.rng.randint(1, 3)):
            if turn:
                messages += self._answer(messages[-1])
            messages.append(self.make_reply(tools))
        return tools, messages

    def _answer(self, reply: dict) -> list[dict]:
        calls = reply.get("tool_calls")
        if not calls:
            return [{"role": "user", "content": self.make_text()}]
        return [{"role": "tool", "tool_call_id": call["id"], "content": self.make_text()} for call in calls]


class TemplateTokenizer:
    """A tokenizer that has nothing but a template."""

    name_or_path = "a template"
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}
    all_special_ids = ()

    def __init__(self, chat_template: str):
        self.chat_template = chat_template
        if "｜" in chat_template:
            self.special_tokens_map = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}

    def get_chat_template(self, tools: object = None) -> str:
        return self.chat_template
