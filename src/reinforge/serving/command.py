"""`reinforge serve MODEL|RUN`: models behind the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import LIMITS, OUTPUT_DIR, option, parse_existing_file
from reinforge.cli.output import say, say_as_is
from reinforge.cli.process import leave
from reinforge.registry import load_named

if TYPE_CHECKING:
    from reinforge.serving.app import ServeApp
    from reinforge.serving.loading import ServeOptions
    from reinforge.serving.models import ServedModels
    from reinforge.serving.recording import Recorder

DEFAULT_PORT, CHECK_SHARE = 8000, 0.01
PROTOCOLS = {
    "fine_tuning": "reinforge.protocols.openai.server.api:make_fine_tuning",
    "art": "reinforge.protocols.art.server.api:make_art",
    "sessions": "reinforge.protocols.sessions.server.api:make_sessions",
    "tinker": "reinforge.protocols.tinker.server.api:make_tinker",
}
"""Option -> what makes its part of the server."""
LEARNING = "reinforge.learning.api:make_learning"
ACCESS, TRAINING, UPSTREAM = "Access", "Training", "Upstream"  # titles of groups of options


def _parse_url(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from reinforge.rollout.models.endpoint_config import validate_url

    try:
        return None if value is None else validate_url(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


@click.command("serve", cls=Command, context_settings={"show_default": True})
@click.argument("models", metavar="MODEL|RUN...", nargs=-1)
@option("host", default="127.0.0.1", group=ACCESS, help="Address to listen on; any other one needs --token_file.")
@option("port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, group=ACCESS, help="TCP port; 0: any free one.")
@option(
    "token_file",
    metavar="FILE",
    group=ACCESS,
    help="File with the key that every request must carry; created, readable by you alone, if it does not exist.",
)
@option(
    "allowed_hosts",
    metavar="NAME,...",
    group=ACCESS,
    help="Additional names of this machine that clients may use in URLs, such as gpu1.example.org.",
)
@option(
    "allowed_origins",
    metavar="ORIGIN,...",
    group=ACCESS,
    help="Origins of other web pages that may use the server (CORS), such as https://chat.example.org; default: none.",
)
@option("upstream", metavar="URL", callback=_parse_url, group=UPSTREAM, help="Large model to pass requests on to.")
@option(
    "fallback", metavar="URL", callback=_parse_url, group=UPSTREAM, help="Large model for what MODEL is not sure of."
)
@option("router", metavar="FILE", callback=parse_existing_file, group=UPSTREAM, help="Says what MODEL is sure of.")
@option("fallback_per_day", metavar="N", type=click.IntRange(0), group=UPSTREAM, help="Most requests to it in a day.")
@option("check_share", type=click.FloatRange(0, 1), group=UPSTREAM, help="Share that both answer, to notice drift.")
@option("record", metavar="FOLDER", group=UPSTREAM, help="Folder for the requests and replies of the large model.")
@option("record_config", metavar="FILE", callback=parse_existing_file, group=UPSTREAM, help="YAML: what is recorded.")
@option("versions", is_flag=True, help="Also serve every checkpoint of a run as RUN@VERSION, if they are adapters.")
@option(
    "compare",
    is_flag=True,
    help="For the chat page: also serve the base model of a run as RUN@0, and offer questions of its data.",
)
@option("device", default="auto", help="auto, cpu, cuda or mps.")
@option("dtype", type=click.Choice(["float32", "bfloat16", "auto"]), help="Data type; default: that of the run.")
@option(
    "full_weights",
    is_flag=True,
    help="Decode with the weights as they are, a token at a time. By default a CPU that is faster so decodes a float32 "
    "model of 20 M parameters or more from float16 copies of its weights, which changes log-probs by about 0.002, and "
    "computes several tokens of a single reply at once where it repeats its context.",
)
@option("max_model_len", type=click.IntRange(min=8), group=LIMITS, help="Maximum tokens of prompt and reply together.")
@option(
    "max_num_seqs",
    type=click.IntRange(min=1),
    default=96,
    group=LIMITS,
    help="Maximum number of replies to sample at the same time.",
)
@option("max_tokens", type=click.IntRange(min=1), group=LIMITS, help="Maximum tokens of a reply.")
@option(
    "max_in_flight",
    type=click.IntRange(min=1),
    default=512,
    group=LIMITS,
    help="Maximum number of concurrent requests; further ones get 429, except those of clients with less than an equal "
    "share, up to twice as many.",
)
@option(
    "fine_tuning",
    is_flag=True,
    group=TRAINING,
    help="Also speak OpenAI's fine-tuning API: clients upload rows and train the models that are served.",
)
@option(
    "lora_rank",
    type=click.IntRange(0, 512),
    default=16,
    group=TRAINING,
    help="Fine-tuning, ART: rank of the adapters; 0: all weights.",
)
@option(
    "max_jobs",
    type=click.IntRange(1, 64),
    default=1,
    group=TRAINING,
    help="Fine-tuning: maximum number of jobs that train at the same time.",
)
@option(
    "allow_python_graders",
    is_flag=True,
    group=TRAINING,
    help="Fine-tuning: run Python graders that clients send. Not a security boundary: only where you would run their "
    "code.",
)
@option(
    "art",
    is_flag=True,
    group=TRAINING,
    help="Also speak the protocols of OpenPipe ART: its clients train LoRA adapters of the models that are served.",
)
@option(
    "sessions",
    is_flag=True,
    group=TRAINING,
    help="Also sample and train for runs elsewhere: `trainer_adapters._type: http`.",
)
@option(
    "tinker",
    is_flag=True,
    group=TRAINING,
    help="Also speak Tinker's protocol: clients train LoRA adapters of the one MODEL.",
)
@option(
    "data_dir",
    metavar="FOLDER",
    default=".reinforge/serve",
    group=TRAINING,
    help="Folder for everything that clients upload and train.",
)
@option(
    "max_models",
    type=click.IntRange(1, 64),
    default=4,
    group=TRAINING,
    help="ART, sessions, Tinker: maximum number of models in training.",
)
@option(
    "learn",
    metavar="FILE",
    callback=parse_existing_file,
    group=TRAINING,
    help="Keep chats, as far as the `record:` block of this YAML file says, and take feedback on them; with `compare:` "
    "feedback promotes or stops the candidate of a folder of versions.",
)
@option("max_rank", type=click.IntRange(1, 512), default=32, group=TRAINING, help="Tinker: largest rank of an adapter.")
@OUTPUT_DIR
def command(models: tuple[str, ...], output_dir: str, **options: Any) -> None:
    """Serve models to any client of OpenAI's or Anthropic's API, and to a chat page in the browser.

    Each MODEL|RUN is a run (`last`: the newest), a folder, a Hugging Face model id, a GGUF file, pip:PACKAGE or
    bundled:NAME. LoRA adapters of one base model share its memory and are sampled in one batch. A folder of versions
    answers to NAME, NAME@7 and NAME@candidate, and follows `reinforge rollback NAME`.

    With --upstream, the server passes requests to a large model and its replies back, and --record keeps them.

    \b
    Examples:
      reinforge serve runs/support-1 --compare
      reinforge serve runs/support-1 runs/support-2 --port 9000
      reinforge serve HuggingFaceTB/SmolLM2-135M-Instruct --host 0.0.0.0 --token_file serve.token
      reinforge serve runs/support-1 --learn learn.yml
      reinforge serve --upstream https://api.openai.com/v1 --record logs
      reinforge serve runs/small --fallback https://api.openai.com/v1 --router router.json
    """
    if bool(models) == (options["upstream"] is not None):
        raise click.UsageError("pass a MODEL|RUN to serve, or --upstream URL to pass requests on")
    if (options["fallback"] is None) != (options["router"] is None):
        raise click.UsageError("--fallback URL and --router FILE need each other")
    if options["fallback"] is None and options["check_share"] is not None:
        raise click.UsageError("--check_share compares MODEL with the fallback; add --fallback URL and --router FILE")
    if options["fallback"] is not None and len(models) != 1:
        raise click.UsageError("--fallback needs exactly one MODEL|RUN, which answers what it is sure of")
    if options["upstream"] is options["fallback"] is None and options["record"] is not None:
        raise click.UsageError("--record keeps what an upstream answers; add --upstream URL or --fallback URL")
    if options["learn"] is not None and not (models and options["fallback"] is None):
        raise click.UsageError("--learn keeps what MODEL|RUN answers, without --upstream and --fallback; see --record")
    if options["record"] is None and options["record_config"] is not None:
        raise click.UsageError("--record_config says what --record keeps; add --record FOLDER")
    try:
        asyncio.run(_serve(models, Path(output_dir), options) if models else _pass_on(options))
        code = 128 + signal.SIGTERM
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    leave(code, at_once=True)  # everything is closed; Python would take seconds to free the models


async def _pass_on(options: dict[str, Any]) -> None:
    from reinforge.serving.access import read_token
    from reinforge.serving.app import ServeApp
    from reinforge.serving.models import ServedModels
    from reinforge.serving.upstream import KEY_HEADER, UpstreamApi

    token = read_token(options["token_file"])
    with _open_recorder(options) as recorder:
        upstream = UpstreamApi(options["upstream"], recorder)
        app = ServeApp(ServedModels(), chat=upstream, key_header=KEY_HEADER, token=token, **_read_access(options))
        async with app:
            say("Passing requests on to the upstream until you press Ctrl-C.")
            _say_upstream(app, options["token_file"])
            if recorder is not None:
                say(f"Recording to {recorder.folder}. Next: reinforge replace {recorder.folder} --model MODEL")
            await _wait_until_stopped(keeps_jobs=False)


@contextlib.contextmanager
def _open_recorder(options: dict[str, Any]) -> Iterator[Recorder | None]:
    """Yields what `--record` asks for, while this server alone writes in its folder."""
    if options["record"] is None:
        yield None
        return
    from reinforge.serving.loading import lock_folder
    from reinforge.serving.recording import Recorder, read_record_config

    folder = Path(options["record"])
    recorder = Recorder(folder, read_record_config(options["record_config"]))
    lock = lock_folder(folder)
    try:
        yield recorder
    finally:
        lock.release()


def _read_access(options: dict[str, Any]) -> dict[str, Any]:
    from reinforge.serving.routes import ServerLimits

    return {
        "host": options["host"],
        "port": options["port"],
        "limits": ServerLimits(max_tokens=options["max_tokens"], max_in_flight=options["max_in_flight"]),
        "allowed_hosts": filter(None, (options["allowed_hosts"] or "").split(",")),
        "allowed_origins": filter(None, (options["allowed_origins"] or "").split(",")),
    }


async def _serve(sources: tuple[str, ...], output_dir: Path, options: dict[str, Any]) -> None:
    from reinforge.runs.progress import open_progress
    from reinforge.serving.access import read_token
    from reinforge.serving.app import ServeApp
    from reinforge.serving.live_versions import LiveVersions
    from reinforge.serving.loading import ModelLoader, ServeOptions, TrainingHost, lock_folder
    from reinforge.serving.models import ServedModels
    from reinforge.serving.version_folder import VersionFolder, is_version_folder

    served = ServedModels()
    token = read_token(options["token_file"])
    named = {name: options[name] for name in {each.name for each in fields(ServeOptions)} & options.keys()}
    named |= {"sources": sources, "output_dir": output_dir, "token": token, "data_dir": Path(options["data_dir"])}
    named |= {"takes_adapters": bool(options["fine_tuning"] and options["lora_rank"])}
    settings = ServeOptions(**named, serves_versions=options["versions"], compares=options["compare"])
    loader = ModelLoader(served, settings)
    host = TrainingHost(served, loader, settings)
    folders = [source for source in sources if is_version_folder(Path(source).expanduser())]
    versions = {source: LiveVersions(VersionFolder(Path(source)), served, loader) for source in folders}
    has_folder = any(options[name] for name in (*PROTOCOLS, "learn"))
    lock = lock_folder(settings.data_dir.absolute()) if has_folder else None
    features = [await load_named(maker)(host) for name, maker in PROTOCOLS.items() if options[name]]
    features += [loader.questions] if options["compare"] else []
    features += versions.values()
    stack = contextlib.AsyncExitStack()
    learning = await load_named(LEARNING)(host, options["learn"], versions.values()) if options["learn"] else None
    features += [] if learning is None else [learning]
    further = await _build_fallback(served, settings, options, stack)
    further |= {} if learning is None else {"keeper": learning.keeper}
    app = ServeApp(served, features, token=token, **_read_access(options), **further)
    try:
        app.listen()  # before models are loaded, which takes long
        for source in sources:
            say(f"Loading {source} ...")
            if not options["tinker"]:  # Tinker's part loads its model itself
                with open_progress() as progress:
                    progress.stage(None, "LOAD", None)
                    await (versions[source].open() if source in versions else loader.open(source))
        async with app:
            _say_address(app, options)
            if options["learn"]:
                say(f"Keeping chats in {settings.data_dir}. Rate one:")
                rated = '{"id": "ID OF AN ANSWER", "thumb": "up"}'
                say_as_is(f"  curl {app.address}/v1/feedback -H 'content-type: application/json' -d '{rated}'")
            if options["art"]:
                say("Point ART's clients at it:")
                say_as_is(f"  ServerlessBackend(api_key=..., base_url='{app.address}/v1')")
            if options["tinker"]:
                key = "tml-local" if token is None else f"$(cat {options['token_file']})"
                say("Point Tinker's clients at it:")
                say_as_is(f"  export TINKER_BASE_URL={app.address} TINKER_API_KEY={key}")
            await _wait_until_stopped(keeps_jobs=options["fine_tuning"] or options["art"])
    finally:
        await loader.close()
        if lock is not None:
            lock.release()
        await stack.aclose()


async def _build_fallback(
    served: ServedModels, settings: ServeOptions, options: dict[str, Any], stack: contextlib.AsyncExitStack
) -> dict[str, Any]:
    """Returns the arguments of a server with an upstream behind its model; empty: it has none."""
    recorder = stack.enter_context(_open_recorder(options))
    if options["fallback"] is None:
        return {}
    from reinforge.routing.router import Router
    from reinforge.routing.signals import AGREEMENT
    from reinforge.runs.journal.served import ServedLog
    from reinforge.runs.saved_model import find_model
    from reinforge.serving.fallback import DayBudget, FallbackApi
    from reinforge.serving.loading import MODEL
    from reinforge.serving.running_check import RunningCheck
    from reinforge.serving.upstream import KEY_HEADER, UpstreamApi

    file: Path = options["router"]
    upstream, router, evaluator = UpstreamApi(options["fallback"], recorder), Router.load(file), None
    if router.evaluator is not None:
        from reinforge.routing.reply_evaluator import open_evaluator

        evaluator = await stack.enter_async_context(open_evaluator(router.evaluator, file.parent, str(file)))
    usual = CHECK_SHARE if router.metric == AGREEMENT else 0.0
    share = usual if options["check_share"] is None else options["check_share"]
    check = RunningCheck(router, share, file.with_suffix(".check.json"))
    budget = DayBudget(options["fallback_per_day"], file.with_suffix(".budget.json"))
    run, limits = find_model(settings.sources[0], settings.output_dir, MODEL).run, _read_access(options)["limits"]
    log = ServedLog(run) if run is not None else None
    say(f"The router decides by {router.describe_signal()}.")
    return {"chat": FallbackApi(served, limits, upstream, check, budget, log, evaluator), "key_header": KEY_HEADER}


async def _wait_until_stopped(*, keeps_jobs: bool) -> None:
    """Returns once SIGTERM comes; Ctrl-C cancels this task. A second signal ends the process at once."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(NotImplementedError):  # Windows: the process ends at once
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        await stopped.wait()
    finally:
        say("Stopping." + (" Jobs are kept, and resume when the server starts again." if keeps_jobs else ""))
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGTERM)


def _say_address(app: ServeApp, options: dict[str, Any]) -> None:
    from reinforge.serving.models import list_names

    token_file = options["token_file"]
    key = "any" if token_file is None else f"$(cat {token_file})"
    names = list_names(app.models.names)
    if options["fallback"] is not None:
        say(f"Serving {names}, and the fallback for what it is not sure of, until you press Ctrl-C.")
        _say_upstream(app, token_file)
        return
    say(f"Serving {names} until you press Ctrl-C. Point a client at it:")
    say_as_is(f"  export OPENAI_BASE_URL={app.address}/v1 OPENAI_API_KEY={key}")
    say(f"Chat in the browser: {app.address}" + ("" if token_file is None else "/?key=KEY"))


def _say_upstream(app: ServeApp, token_file: str | None) -> None:
    from reinforge.serving.upstream import KEY_HEADER

    say("Point a client at it, with the key of the large model:")
    say_as_is(f"  export OPENAI_BASE_URL={app.address}/v1 ANTHROPIC_BASE_URL={app.address}")
    if token_file is not None:
        say(f"Each request also needs the header {KEY_HEADER}, with the key in {token_file}.")
