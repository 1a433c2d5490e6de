"""Runs real clients and agent frameworks, each in an environment of its own: `python -m tests.clients [NAME...]`.

An environment under `.clients/` has the packages of one client. It finds torch, and ours, in the environment that runs
this, behind its own packages, so that torch is not installed ten times. Where both have a package, the client's version
counts. Without names all of them run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.openai_server import fails
from tests.openai_service import OpenAIService

FOLDER, RUNS = Path(".clients"), Path(".clients/runs")
EXAMPLE = Path("examples/tool_agent")
SHORT = {
    "finetuning.num_epochs": "1",
    "finetuning.output_dir": str(RUNS.absolute()),
    "trajectory_builders.groups.examples_per_epoch": "8",
    "eval.general.dataset.num_select": "10",
    "eval.general.dataset.num_confirm": "20",
}
QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
"""Frameworks send nothing home from the tests."""
FINE_TUNING, GATEWAY, EXPORT = "fine-tuning API", "gateway's API", "exported files"
"""Checks that are no agents: our stand-in for OpenAI's fine-tuning API, the gateway's answers, exports in llama.cpp."""


@dataclass(frozen=True)
class Environment:
    """An environment of its own.

    Attributes:
        name: Its folder.
        packages: What is installed there.
        checks: Agents of `tests/clients/agents`, snippets of the documentation (`page:NAME`), or other checks.
        example: The file of `examples/tool_agent` that is trained there.
    """

    name: str
    packages: tuple[str, ...]
    checks: tuple[str, ...]
    example: str = ""

    @property
    def folder(self) -> Path:
        """Where it is."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Its interpreter; npm's packages are used from this one."""
        return Path(sys.executable) if self.name == "node" else self.folder.absolute() / "bin" / "python"

    def install(self) -> None:
        """Makes it, or updates it."""
        if self.name == "node":
            self.folder.mkdir(parents=True, exist_ok=True)
            run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(self.folder), *self.packages])
            return
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)
        run([str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.packages])
        ours = sysconfig.get_path("purelib")
        paths = subprocess.run(
            [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        # `addsitedir` appends: the environment's own packages come first, and ours are found as in our environment
        Path(paths.stdout.strip(), "zz_reinforge.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def check(self) -> None:
        """Runs its checks."""
        for check in (FINE_TUNING, GATEWAY, EXPORT):
            if check in self.checks:
                CHECKS[check](self)
        agents = [check for check in self.checks if check not in CHECKS]
        if agents:
            run([str(self.python), "-m", "tests.clients.train", *agents])
        if self.example:
            self.train_example()

    def train_example(self) -> None:
        """Trains the example for an epoch."""
        shutil.rmtree(RUNS / self.name, ignore_errors=True)
        folder, settings = EXAMPLE, {**SHORT, "workflow.function": f"{Path(self.example).stem}:agent"}
        if self.name == "node":
            folder = shutil.copytree(EXAMPLE, self.folder / EXAMPLE.name, dirs_exist_ok=True)
            settings = {**SHORT, "workflow": f"{{_type: command, command: [node, {self.example}]}}"}
        options = [part for path, value in settings.items() for part in ("-o", path, value)]
        command = [str(self.python), "-m", "reinforge", "finetune", "tool_agent.yml", "--run_name", self.name, *options]
        run(command, folder)
        sys.stdout.write(f"  ok: {EXAMPLE / self.example} is trained\n")


def check_fine_tuning(environment: Environment) -> None:
    """Runs the official client's fine-tuning API against our stand-in, whose first response is a failure."""
    script = Path(__file__).with_name("openai_sdk.py")
    with OpenAIService() as service:
        service.faults["create"] = [fails(503)]
        run([str(environment.python), str(script), service.url, service.key])


def check_gateway(environment: Environment) -> None:
    """Sends good and bad requests of every kind to the gateway; none may be answered with a 5xx."""
    program = environment.python.with_name("schemathesis")
    run([sys.executable, "-m", "tests.clients.gateway", str(program), "--max-examples", "30"])


def check_export(environment: Environment) -> None:
    """Loads exported GGUF files in llama.cpp."""
    run([str(environment.python), "-m", "tests.clients.exported"])


CHECKS = {FINE_TUNING: check_fine_tuning, GATEWAY: check_gateway, EXPORT: check_export}
SDK = (FINE_TUNING, "openai_sdk", "openai_responses", "page:openai_sdk")
ENVIRONMENTS = (
    *(Environment(f"openai-{each}", (f"openai=={each}",), SDK, "agent.py") for each in ("1.109.1", "2.8.0", "3.54.0")),
    Environment(
        "langgraph",
        ("langgraph", "langchain", "langchain-openai"),
        ("langgraph", "page:langgraph"),
        "langgraph_agent.py",
    ),
    Environment(
        "pydantic-ai", ("pydantic-ai-slim[openai]",), ("pydantic_ai", "page:pydantic_ai"), "pydantic_ai_agent.py"
    ),
    Environment(
        "openai-agents", ("openai-agents",), ("openai_agents", "openai_agents_responses", "page:openai_agents")
    ),
    Environment("smolagents", ("smolagents[openai]",), ("smolagents", "page:smolagents")),
    Environment("crewai", ("crewai[openai]",), ("crewai", "page:crewai")),
    Environment("dspy", ("dspy",), ("dspy", "page:dspy")),
    Environment("anthropic", ("anthropic",), ("anthropic", "page:anthropic")),
    Environment("node", ("openai", "ai", "@ai-sdk/openai-compatible", "zod"), ("openai.mjs", "ai.mjs"), "agent.mjs"),
    Environment("schemathesis", ("schemathesis",), (GATEWAY,)),
    Environment("llama-cpp", ("llama-cpp-python", "gguf"), (EXPORT,)),  # compiles llama.cpp, about five minutes
)


def run(command: Sequence[str], folder: Path | None = None) -> None:
    """Runs a program; shows its output and ends this one if it fails."""
    pipe, environment = subprocess.PIPE, {**os.environ, **QUIET}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with exit code {done.returncode}: {' '.join(command)}")
    for line in done.stdout.splitlines():
        if line.startswith("  ok: "):
            sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare_examples(names: Sequence[str]) -> None:
    """Checks that the example is the same agent in every framework: the same tokens were sampled and trained."""
    tokens = {name: json.loads((RUNS / name / "summary.json").read_text())["tokens"] for name in names}
    if len({str(each) for each in tokens.values()}) > 1:
        sys.exit(f"the examples differ: {tokens}")
    if len(names) > 1:
        sys.stdout.write(f"  ok: the same tokens in all of {', '.join(names)}: {tokens[names[0]]}\n")


def main(names: Sequence[str]) -> None:
    """Installs and checks the environments with these names, or all."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    if unknown := set(names) - known.keys():
        sys.exit(f"no environment {', '.join(sorted(unknown))}; there is {', '.join(known)}")
    chosen = [known[name] for name in names] or ENVIRONMENTS
    for environment in chosen:
        sys.stdout.write(f"{environment.name}\n")
        sys.stdout.flush()
        environment.install()
        environment.check()
    compare_examples([environment.name for environment in chosen if environment.example])


if __name__ == "__main__":
    main(sys.argv[1:])
