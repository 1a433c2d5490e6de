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
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reinforge.rollout.workflows.presets import PRESETS
from tests.openai_server import fails
from tests.protocols.openai_service import OpenAIService

FOLDER, RUNS = Path(".clients"), Path(".clients/runs")
EXAMPLE = Path("examples/tool_agent")
NPM = ("node", "langchain-js", "mastra", "coding-agents")
"""Environments of npm's packages, beside our own; some bring a newer Node."""
SHORT = {
    "finetuning.num_epochs": "1",
    "finetuning.output_dir": str(RUNS.absolute()),
    "trajectory_builders.groups.examples_per_epoch": "8",
    "eval.general.dataset.num_select": "10",
    "eval.general.dataset.num_confirm": "20",
}
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "WEAVE_DISABLED": "1",
    "WANDB_MODE": "offline",
    "AGNO_TELEMETRY": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Frameworks send nothing home from the tests."""
FINE_TUNING, GATEWAY, EXPORT = "fine-tuning API", "gateway's API", "exported files"
CODING = "coding agents on the template's repositories"
TINKER, ART, NAT = "Tinker's protocol", "ART's training service", "the NeMo Agent Toolkit"
OPENENV, HARBOR, VERIFIERS = "OpenEnv's echo server", "Harbor's task folders", "rollouts of verifiers"
SERVED = "fine-tuning on our server"
GAMES, BFCL, TASKS = "packages of games", "function calls of bfcl-eval", "tasks of reasoning-gym"
STORAGE, SKYPILOT = "object storage", "SkyPilot's reader"
"""Checks that are no agents: our stand-in for OpenAI's fine-tuning API, the gateway's answers, exports in llama.cpp."""


@dataclass(frozen=True)
class Environment:
    """An environment of its own.

    Attributes:
        name: Its folder.
        packages: What is installed there.
        checks: Agents of `tests/clients/agents`, snippets of the documentation (`page:NAME`), or other checks.
        example: The file of `examples/tool_agent` that is trained there.
        bare: What is installed there without the packages that it names itself, such as another torch.
        interpreter: The Python that its packages need, such as `python3.12`, if it is another than ours; without it the
            environment is left out. It has the client's packages alone.
    """

    name: str
    packages: tuple[str, ...]
    checks: tuple[str, ...]
    example: str = ""
    bare: tuple[str, ...] = ()
    interpreter: str = ""

    @property
    def is_possible(self) -> bool:
        """False if the machine does not have its interpreter."""
        if not self.interpreter:
            return True
        found = shutil.which(self.interpreter)  # perhaps a program that only looks for interpreters
        return found is not None and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode

    @property
    def folder(self) -> Path:
        """Where it is."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Its interpreter; npm's packages are used from this one."""
        return Path(sys.executable) if self.name in NPM else self.folder.absolute() / "bin" / "python"

    def install(self) -> None:
        """Makes it, or updates it."""
        if self.name in NPM:
            self.folder.mkdir(parents=True, exist_ok=True)
            run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(self.folder), *self.packages])
            return
        if not self.python.exists() and self.interpreter:
            run([self.interpreter, "-m", "venv", str(self.folder)])
        elif not self.python.exists():
            venv.create(self.folder, with_pip=True)
        install = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if self.packages:
            run([*install, *self.packages])
        if self.bare:
            run([*install, "--no-deps", *self.bare])
        if self.interpreter:
            return
        ours = sysconfig.get_path("purelib")
        paths = subprocess.run(
            [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        # `addsitedir` appends: the environment's own packages come first, and ours are found as in our environment
        Path(paths.stdout.strip(), "zz_reinforge.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def check(self) -> None:
        """Runs its checks."""
        for check in CHECKS:
            if check in self.checks:
                CHECKS[check](self)
        agents = [check for check in self.checks if check not in CHECKS]
        if agents:
            run([str(self.python), "-m", "tests.clients.train", str(self.folder), *agents])
        if self.example:
            self.train_example()

    def train_example(self) -> None:
        """Trains the example for an epoch."""
        shutil.rmtree(RUNS / self.name, ignore_errors=True)
        folder, settings = EXAMPLE, {**SHORT, "workflow.function": f"{Path(self.example).stem}:agent"}
        if self.name in NPM:
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


def check_served_fine_tuning(environment: Environment) -> None:
    """Trains a tiny model with the official client through `reinforge serve --fine_tuning`."""
    from tests.protocols.fine_tuning import serve_tiny_model  # imports torch

    with tempfile.TemporaryDirectory() as folder, serve_tiny_model(Path(folder)) as url:
        run([str(environment.python), str(Path(__file__).with_name("fine_tuning.py")), url])


def check_gateway(environment: Environment) -> None:
    """Sends good and bad requests of every kind to the gateway; none may be answered with a 5xx."""
    program = environment.python.with_name("schemathesis")
    run([sys.executable, "-m", "tests.clients.gateway", str(program), "--max-examples", "30"])


def check_export(environment: Environment) -> None:
    """Loads exported GGUF files in llama.cpp."""
    run([str(environment.python), "-m", "tests.clients.exported"])


def check_coding_agents(environment: Environment) -> None:
    """Trains every preset whose program the environment has; one refused request of a program is a failure."""
    bin_folder = environment.folder.absolute() / ("node_modules/.bin" if environment.name in NPM else "bin")
    presets = [name for name, preset in PRESETS.items() if (bin_folder / preset["command"][0]).exists()]
    variables = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    run([sys.executable, "-m", "tests.clients.coding_agents", *presets], variables=variables)


def check_openenv(environment: Environment) -> None:
    """Trains in the echo server that the package makes."""
    run([sys.executable, "-m", "tests.clients.environments", "openenv", str(environment.python)])


def check_harbor(environment: Environment) -> None:
    """Trains on three task folders with our agent."""
    run([sys.executable, "-m", "tests.clients.environments", "harbor"])


def check_verifiers(environment: Environment) -> None:
    """Trains in environments of the package's interface, which run in its own interpreter."""
    run([sys.executable, "-m", "tests.clients.environments", environment.name, str(environment.python)])


def check_storage(environment: Environment) -> None:
    """Loses the machine of a run, and resumes it from S3."""
    run([str(environment.python), "-m", "tests.clients.object_storage"])


def check_skypilot(environment: Environment) -> None:
    """Lets SkyPilot read the task of `examples/cluster`."""
    run([str(environment.python), "-m", "tests.clients.skypilot_task"])


def check_tinker(environment: Environment) -> None:
    """Runs the blocks of docs/tinker.md: Tinker's SDK and recipes of its cookbook train on our server."""
    command = [str(environment.python), "-m", "tests.clients.tinker_recipes", str(environment.folder / "recipes")]
    run(command, variables={"OMP_NUM_THREADS": "1"})  # for so small a model several threads mostly wait


@contextmanager
def serve_art(port: int) -> Iterator[str]:
    """Yields the URL of a server that trains a tiny model over ART's protocols."""
    command = [sys.executable, "-m", "tests.clients.art_server", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None  # it is a pipe
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def check_art(environment: Environment) -> None:
    """Runs the snippet of docs/art.md with ART's client."""
    script = Path(__file__).with_name("art_service.py").absolute()
    with serve_art(0) as url:
        run([str(environment.python), str(script), url, "tiny"], environment.folder)


def check_nat(environment: Environment) -> None:
    """Trains an agent of the NeMo Agent Toolkit with `nat finetune`; its plugin looks for the server at port 8000."""
    agent = Path(__file__).with_name("nat_agent").absolute()
    run([str(environment.python), "-m", "pip", "install", "--quiet", "--no-deps", str(agent)])
    with tempfile.TemporaryDirectory() as folder, serve_art(8000) as url:
        rows = [{"id": number, "question": f"say {number}", "answer": "a"} for number in range(16)]
        Path(folder, "data.json").write_text(json.dumps(rows))
        variables = {"SERVER_URL": url, "SERVER_IP": "127.0.0.1", "OUTPUT_DIR": folder}
        command = [str(environment.python.with_name("nat")), "--log-level", "warning", "finetune", "--config_file"]
        run([*command, str(agent / "finetune.yml")], environment.folder, variables)
        history = json.loads(Path(folder, "run", "reward_history.json").read_text())
    rewards = [round(epoch["avg_reward"], 3) for epoch in history]
    if rewards[-1] < rewards[0] + 0.2:
        sys.exit(f"the reward does not rise: {rewards}")
    sys.stdout.write(f"  ok: `nat finetune` trains over ART's plugin: rewards {rewards}\n")


def check_games(environment: Environment) -> None:
    """Runs the tests of an environment's adapter with its package, and trains a tiny model in it."""
    tests = "tests/environments/test_packages_of_games.py"
    run([str(environment.python), "-m", "pytest", tests, "-q", "-p", "no:cacheprovider"])
    check_tasks(environment)


def check_tasks(environment: Environment) -> None:
    run([str(environment.python), "-m", "tests.clients.environments", environment.name])


def check_bfcl(environment: Environment) -> None:
    run([str(environment.python), "-m", "tests.clients.bfcl"])


CHECKS = {
    FINE_TUNING: check_fine_tuning,
    SERVED: check_served_fine_tuning,
    GATEWAY: check_gateway,
    EXPORT: check_export,
    CODING: check_coding_agents,
    OPENENV: check_openenv,
    HARBOR: check_harbor,
    VERIFIERS: check_verifiers,
    TINKER: check_tinker,
    ART: check_art,
    NAT: check_nat,
    GAMES: check_games,
    BFCL: check_bfcl,
    TASKS: check_tasks,
    STORAGE: check_storage,
    SKYPILOT: check_skypilot,
}
SDK = (FINE_TUNING, SERVED, "openai_sdk", "openai_responses", "page:openai_sdk")
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
    Environment(
        "autogen",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5", "openai==3.57.0"),
        ("autogen.py", "autogen_team.py", "page:autogen"),
    ),
    Environment(
        "llama-index",
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1", "openai==2.54.0"),
        ("llama_index.py", "page:llama_index"),
    ),
    Environment("haystack", ("haystack-ai==3.4.1", "openai==3.57.0"), ("haystack.py", "page:haystack")),
    Environment("google-adk", ("google-adk==2.13.0", "litellm==1.110.2"), ("google_adk.py", "page:google_adk")),
    Environment("strands", ("strands-agents[openai]==1.62.0", "openai==2.54.0"), ("strands.py", "page:strands")),
    Environment("agno", ("agno==3.1.10", "openai==3.57.0"), ("agno.py", "page:agno")),
    Environment("anthropic", ("anthropic",), ("anthropic", "page:anthropic")),
    Environment("litellm", ("litellm==1.110.2",), ("litellm.py",)),
    Environment(
        "agent-framework",
        ("agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"),
        ("agent_framework.py",),
    ),
    Environment("instructor", ("instructor==1.17.0",), ("instructor.py",)),
    Environment("node", ("openai", "ai", "@ai-sdk/openai-compatible", "zod"), ("openai.mjs", "ai.mjs"), "agent.mjs"),
    Environment(
        "langchain-js",
        ("langchain@1.5.14", "@langchain/core@1.4.0", "@langchain/openai@1.6.0", "zod@4.6.7", "node@22"),
        ("langchain.mjs",),
    ),
    Environment("mastra", ("@mastra/core@1.71.0", "zod@4.6.7", "node@22"), ("mastra.mjs",)),
    Environment(
        "coding-agents",
        (
            *("@anthropic-ai/claude-code@2.1", "@openai/codex@0.169", "opencode-ai@1.18"),
            *("@google/gemini-cli@0.61", "@qwen-code/qwen-code@0.15"),
        ),
        (CODING,),
    ),
    Environment("python-agents", ("mini-swe-agent==2.4.*", "aider-chat==0.86.*"), (CODING,)),
    Environment("openenv", ("openenv-core==0.3.0",), (OPENENV, HARBOR)),
    Environment("verifiers-classic", ("verifiers==0.1.14", "reasoning-gym==0.1.25"), (VERIFIERS,)),
    Environment("verifiers-tasks", ("verifiers[openenv]==0.4.0",), (VERIFIERS,)),
    Environment("schemathesis", ("schemathesis",), (GATEWAY,)),
    Environment(
        "tinker",
        ("pyqwest", "h2", "blobfile", "chz", "pyrage", "termcolor", "tiktoken"),
        (TINKER,),
        bare=(
            "tinker==0.38.0",
            "tinker-cookbook==0.5.8",
            "math-verify",
            "latex2sympy2_extended",
            "pylatexenc",
            "antlr4-python3-runtime>=4.11,<4.14",
        ),
    ),
    Environment("art", ("openpipe-art==0.5.23",), (ART,), interpreter="python3.12"),
    Environment(
        "nat",
        (
            "nvidia-nat==1.9.0",
            "nvidia-nat-openpipe-art==1.9.0",
            "nvidia-nat-langchain==1.9.0",
            "nvidia-nat-profiler==1.9.0",
            "openpipe-art==0.5.17",
            "langchain-openai",
            "pyarrow",
            "setuptools>=77",
        ),
        (NAT,),
        interpreter="python3.12",
    ),
    Environment("textarena", ("textarena",), (GAMES,)),
    Environment("gymnasium", ("gymnasium",), (GAMES,)),
    Environment("reasoning_gym", (), (TASKS,), bare=("reasoning-gym",)),
    Environment("s3", ("s3fs", "moto[server]"), (STORAGE,)),
    Environment("skypilot", ("skypilot",), (SKYPILOT,)),
    Environment("bfcl", (), (BFCL,), bare=("bfcl-eval==2026.3.23",)),
    Environment("llama-cpp", ("llama-cpp-python", "gguf"), (EXPORT,)),  # compiles llama.cpp, about five minutes
)


def run(command: Sequence[str], folder: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
    """Runs a program; shows its output and ends this one if it fails."""
    pipe, environment = subprocess.PIPE, {**os.environ, **QUIET, **(variables or {})}
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
        sys.stdout.write(f"{environment.name}\n" if environment.is_possible else f"{environment.name}: left out, ")
        if not environment.is_possible:
            sys.stdout.write(f"{environment.interpreter} is not there\n")
            continue
        sys.stdout.flush()
        environment.install()
        environment.check()
    compare_examples([environment.name for environment in chosen if environment.example])


if __name__ == "__main__":
    main(sys.argv[1:])
