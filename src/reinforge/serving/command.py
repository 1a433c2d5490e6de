"""`reinforge serve MODEL|RUN`: models behind the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import LIMITS, OUTPUT_DIR, option
from reinforge.cli.output import say, say_as_is
from reinforge.cli.process import leave
from reinforge.registry import load_named

if TYPE_CHECKING:
    from reinforge.serving.app import ServeApp

DEFAULT_PORT = 8000
PROTOCOLS = {
    "fine_tuning": "reinforge.protocols.openai.server.api:make_fine_tuning",
    "art": "reinforge.protocols.art.server.api:make_art",
    "sessions": "reinforge.protocols.sessions.server.api:make_sessions",
    "tinker": "reinforge.protocols.tinker.server.api:make_tinker",
}
"""Option -> what makes its part of the server."""
ACCESS, TRAINING = "Access", "Training"  # titles of groups of options


@click.command("serve", cls=Command, context_settings={"show_default": True})
@click.argument("models", metavar="MODEL|RUN...", nargs=-1, required=True)
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
@option("versions", is_flag=True, help="Also serve every checkpoint of a run as RUN@VERSION, if they are adapters.")
@option(
    "compare",
    is_flag=True,
    help="For the chat page: also serve the base model of a run as RUN@0, and offer questions of its data.",
)
@option("device", default="auto", help="auto, cpu, cuda or mps.")
@option("dtype", type=click.Choice(["float32", "bfloat16", "auto"]), help="Data type; default: that of the run.")
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
@option("max_rank", type=click.IntRange(1, 512), default=32, group=TRAINING, help="Tinker: largest rank of an adapter.")
@OUTPUT_DIR
def command(models: tuple[str, ...], output_dir: str, **options: Any) -> None:
    """Serve models to any client of OpenAI's or Anthropic's API, and to a chat page in the browser.

    Each MODEL|RUN is a run (`last`: the newest), a folder, a Hugging Face model id, a GGUF file, pip:PACKAGE or
    bundled:NAME. LoRA adapters of one base model share its memory and are sampled in one batch.

    \b
    Examples:
      reinforge serve runs/support-1 --compare
      reinforge serve runs/support-1 runs/support-2 --port 9000
      reinforge serve HuggingFaceTB/SmolLM2-135M-Instruct --host 0.0.0.0 --token_file serve.token
    """
    try:
        asyncio.run(_serve(models, Path(output_dir), options))
        code = 128 + signal.SIGTERM
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    leave(code, at_once=True)  # everything is closed; Python would take seconds to free the models


async def _serve(sources: tuple[str, ...], output_dir: Path, options: dict[str, Any]) -> None:
    from reinforge.runs.progress import open_progress
    from reinforge.serving.access import read_token
    from reinforge.serving.app import ServeApp
    from reinforge.serving.loading import ModelLoader, ServeOptions, TrainingHost, lock_folder
    from reinforge.serving.models import ServedModels
    from reinforge.serving.routes import ServerLimits

    served = ServedModels()
    token = read_token(options["token_file"])
    named = {name: options[name] for name in {each.name for each in fields(ServeOptions)} & options.keys()}
    named |= {"sources": sources, "output_dir": output_dir, "token": token, "data_dir": Path(options["data_dir"])}
    named |= {"takes_adapters": bool(options["fine_tuning"] and options["lora_rank"])}
    settings = ServeOptions(**named, serves_versions=options["versions"], compares=options["compare"])
    loader = ModelLoader(served, settings)
    host = TrainingHost(served, loader, settings)
    lock = lock_folder(settings.data_dir.absolute()) if any(options[name] for name in PROTOCOLS) else None
    features = [await load_named(maker)(host) for name, maker in PROTOCOLS.items() if options[name]]
    features += [loader.questions] if options["compare"] else []
    app = ServeApp(
        served,
        features,
        host=options["host"],
        port=options["port"],
        token=token,
        limits=ServerLimits(max_tokens=options["max_tokens"], max_in_flight=options["max_in_flight"]),
        allowed_hosts=filter(None, (options["allowed_hosts"] or "").split(",")),
        allowed_origins=filter(None, (options["allowed_origins"] or "").split(",")),
    )
    try:
        app.listen()  # before models are loaded, which takes long
        for source in sources:
            say(f"Loading {source} ...")
            if not options["tinker"]:  # Tinker's part loads its model itself
                with open_progress() as progress:
                    progress.stage(None, "LOAD", None)
                    await loader.open(source)
        async with app:
            _say_address(app, options["token_file"])
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


def _say_address(app: ServeApp, token_file: str | None) -> None:
    key = "any" if token_file is None else f"$(cat {token_file})"
    say(f"Serving {', '.join(app.models.names)} until you press Ctrl-C. Point a client at it:")
    say_as_is(f"  export OPENAI_BASE_URL={app.address}/v1 OPENAI_API_KEY={key}")
    say(f"Chat in the browser: {app.address}" + ("" if token_file is None else "/?key=KEY"))
