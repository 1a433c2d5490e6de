"""The form of a grader, as OpenAI's fine-tuning API has it.

    {"type": "string_check", "name": "same", "operation": "eq",
     "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}

    {"type": "multi", "name": "both", "calculate_output": "0.8 * same + 0.2 * near",
     "graders": {"same": {...}, "near": {...}}}

Everything that is wrong with a grader is reported at once, each problem with its path.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator

from reinforge.errors import ConfigError, Problem
from reinforge.limits import get_limits
from reinforge.protocols.openai.graders.formula import Formula, FormulaError, compile_python
from reinforge.protocols.openai.graders.templates import TemplateError, check_template

METRICS = ("fuzzy_match", "bleu", "gleu", *(f"rouge_{n}" for n in range(1, 6)), "rouge_l")
UNSUPPORTED_METRICS = {
    "cosine": "it needs an embedding model, which this server does not have",
    "meteor": "it needs WordNet, which would have to be downloaded",
}
Name = Annotated[str, Field(min_length=1, max_length=128)]
Template = Annotated[str, Field(max_length=get_limits().grader_chars)]


class GraderBase(BaseModel):
    """What every grader has; further keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name = Field(description="Its name, by which a `multi` refers to it.")


class StringCheck(GraderBase):
    type: Literal["string_check"]
    input: Template = Field(description="Template of the text.")
    reference: Template = Field(description="Template of what it is compared with.")
    operation: Literal["eq", "ne", "like", "ilike"] = Field(
        description="equal, not equal, contains, or contains with upper and lower case ignored."
    )


class TextSimilarity(GraderBase):
    """How similar two texts are, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Template = Field(description="Template of the text.")
    reference: Template = Field(description="Template of what it is compared with.")
    evaluation_metric: str = Field(description=f"One of {', '.join(METRICS)}.")

    @model_validator(mode="after")
    def _check_metric(self) -> TextSimilarity:
        metric = self.evaluation_metric
        if metric in UNSUPPORTED_METRICS:
            raise ValueError(f"evaluation_metric {metric} is not supported: {UNSUPPORTED_METRICS[metric]}")
        if metric not in METRICS:
            raise ValueError(f"evaluation_metric is {metric[:80]!r}; allowed: {', '.join(METRICS)}")
        return self


class GraderMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]] | dict[str, Any]
    type: Literal["message"] = "message"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = self.content if isinstance(self.content, list) else [self.content]
        return "".join(str(part["text"]) for part in parts)

    @model_validator(mode="after")
    def _check_parts(self) -> GraderMessage:
        parts = self.content if isinstance(self.content, list) else [self.content]
        for part in parts:
            if not isinstance(part, str) and not (
                part.get("type") in ("input_text", "output_text", "text") and isinstance(part.get("text"), str)
            ):
                raise ValueError('content: only text is supported: a string, or parts {"type": "input_text", "text"}')
        return self


class GraderSampling(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    max_completions_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: str | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _check_effort(self) -> GraderSampling:
        if self.reasoning_effort not in (None, "default"):
            message = f"reasoning_effort {self.reasoning_effort[:20]!r} is not supported"
            raise ValueError(f"{message}: the model reasons as its chat template says")
        return self


class ScoreModel(GraderBase):
    type: Literal["score_model"]
    model: Name = Field(description="The model that grades.")
    input: list[GraderMessage] = Field(min_length=1, max_length=get_limits().request_items, description="Its prompt.")
    range: tuple[FiniteFloat, FiniteFloat] = Field(default=(0.0, 1.0), description="Lowest and highest score.")
    sampling_params: GraderSampling | None = None

    @model_validator(mode="after")
    def _check_range(self) -> ScoreModel:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range: expected the lowest and the highest score, found {list(self.range)}")
        return self


class LabelModel(GraderBase):
    """1.0 if the label that a model chooses is one of those that pass, else 0.0."""

    type: Literal["label_model"]
    model: Name = Field(description="The model that grades.")
    input: list[GraderMessage] = Field(min_length=1, max_length=get_limits().request_items, description="Its prompt.")
    labels: list[Name] = Field(min_length=1, description="The labels that it chooses from.")
    passing_labels: list[Name] = Field(min_length=1, description="Those that pass.")
    sampling_params: GraderSampling | None = None

    @model_validator(mode="after")
    def _check_labels(self) -> LabelModel:
        if unknown := sorted({*self.passing_labels} - {*self.labels})[:20]:
            raise ValueError(f"passing_labels has {', '.join(unknown)}, which labels does not have")
        return self


class PythonGrader(GraderBase):
    """What `grade(sample, item)` returns; runs only where the operator has allowed it."""

    type: Literal["python"]
    source: str = Field(
        max_length=get_limits().grader_chars, description="Python code that defines `grade(sample, item)`."
    )
    image_tag: str | None = None

    @model_validator(mode="after")
    def _check_source(self) -> PythonGrader:
        try:
            compile_python(self.source, "exec")
        except ValueError as error:
            raise ValueError(f"source is not valid Python: {error}") from None
        return self


Leaf = StringCheck | TextSimilarity | ScoreModel | LabelModel | PythonGrader


class Multi(GraderBase):
    """A formula over the scores of other graders."""

    type: Literal["multi"]
    graders: dict[str, Annotated[Leaf, Field(discriminator="type")]] = Field(
        min_length=1, max_length=get_limits().graders, description="Name in the formula -> grader."
    )
    calculate_output: str = Field(max_length=1000, description="The formula, such as `0.5 * a + 0.5 * b`.")

    @model_validator(mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        """Takes a single grader too, which is what the official client's types allow."""
        graders = value.get("graders") if isinstance(value, dict) else None
        if isinstance(graders, dict) and isinstance(graders.get("type"), str) and isinstance(graders.get("name"), str):
            return {**value, "graders": {graders["name"]: graders}}
        return value

    @model_validator(mode="after")
    def _check_formula(self) -> Multi:
        try:
            Formula(self.calculate_output, self.graders)
        except FormulaError as error:
            raise ValueError(f"calculate_output: {error}") from None
        return self


Grader = Leaf | Multi
_ADAPTER: TypeAdapter[Grader] = TypeAdapter(Annotated[Grader, Field(discriminator="type")])


def parse_grader(value: Any, *, allow_python: bool = False, path: str = "grader") -> Grader:
    try:
        grader = _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise ConfigError([_to_problem(each, path) for each in error.errors(include_url=False)]) from None
    problems = list[Problem]()
    for name, each in list_graders(grader):
        where = f"{path}.graders.{name}" if isinstance(grader, Multi) else path
        problems += _check(each, where, allow_python)
    if problems:
        raise ConfigError(problems)
    return grader


def list_graders(grader: Grader) -> list[tuple[str, Grader]]:
    """Returns a grader with its name; of a `multi` its parts, by their names in the formula."""
    return list(grader.graders.items()) if isinstance(grader, Multi) else [(grader.name, grader)]


def list_models(grader: Grader) -> list[str]:
    named = [each.model for _, each in list_graders(grader) if isinstance(each, ScoreModel | LabelModel)]
    return list(dict.fromkeys(named))


def list_templates(grader: Grader) -> list[tuple[str, str]]:
    if isinstance(grader, StringCheck | TextSimilarity):
        return [("input", grader.input), ("reference", grader.reference)]
    if isinstance(grader, ScoreModel | LabelModel):
        return [(f"input[{number}].content", each.text) for number, each in enumerate(grader.input)]
    return []


def _check(grader: Grader, where: str, allow_python: bool) -> list[Problem]:
    if isinstance(grader, PythonGrader) and not allow_python:
        message = "graders in Python are turned off, since they run code of any client of this server"
        return [Problem(where, message, "the operator can allow them; or use string_check, text_similarity or multi")]
    problems = []
    for key, template in list_templates(grader):
        try:
            check_template(template)
        except TemplateError as error:
            problems.append(Problem(f"{where}.{key}", str(error)))
    return problems


def _to_problem(error: Any, path: str) -> Problem:
    """Returns pydantic's error with a path that leaves out the name of the type that was tried."""
    kinds = {get_args(each.model_fields["type"].annotation)[0] for each in get_args(Grader)}
    parts = [str(part) for part in error["loc"] if str(part) not in kinds]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        message = f"type must be one of {', '.join(sorted(kinds))}"
        if error["type"] == "union_tag_invalid":
            message += f"; found {str(error['ctx'].get('tag'))[:80]!r}"
    return Problem(".".join([path, *parts]), message)
