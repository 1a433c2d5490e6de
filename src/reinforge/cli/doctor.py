"""`reinforge doctor`: whether this installation works, down to a tiny model that learns."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON, OUTPUT_DIR, option
from reinforge.cli.output import say, say_json, without_secrets

if TYPE_CHECKING:
    from reinforge.trainer.setup.installation import InstallationCheck

BROKEN = 4  # the exit code of an environment that does not work
INSTALL_AGAIN = 'pip install --force-reinstall --no-deps reinforge, then pip install "reinforge[all]"'
REINSTALL = (
    "if the checks above passed, install torch again (docs/quickstart.md); `reinforge doctor --debug` prints the "
    "traceback, to report together with `reinforge env`"
)

SELF_TEST = "reinforge.tasks.self_test.learning:run_self_test"


@click.command("doctor", cls=Command, context_settings={"show_default": True})
@OUTPUT_DIR
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", help="Device to train on.")
@option("no_training", is_flag=True, help="Only check the installation; train nothing.")
@JSON
@click.pass_context
def command(context: click.Context, output_dir: str, device: str, no_training: bool, as_json: bool) -> None:
    """Check packages, devices, disks and locks, then train a tiny model through the whole path (half a minute).

    The model starts from random weights, is stopped, resumed and verified, and must be better than before on fresh
    episodes. Exits with code 4 if something is broken, with what to do about it.

    \b
    Example:
      reinforge doctor
      reinforge doctor --no_training --output_dir /data/runs
    """
    try:
        from reinforge.trainer.setup.installation import check_installation
    except ImportError as error:  # a package that every command needs
        _exit_without_packages(error, as_json=as_json)
    checks = check_installation(Path(output_dir))
    if not as_json:
        for check in checks:
            _show(check)
    is_broken = any(check.state == "broken" for check in checks)
    if not no_training and not is_broken:
        checks.append(_try_learning(device, debug=context.meta["debug"], silent=as_json))
        if not as_json:
            _show(checks[-1])
    is_broken = any(check.state == "broken" for check in checks)
    if as_json:
        say_json(without_secrets({"ok": not is_broken, "checks": [asdict(check) for check in checks]}))
    else:
        say("something is broken: see above" if is_broken else "everything works")
    if is_broken:
        raise SystemExit(BROKEN)


def _exit_without_packages(error: ImportError, *, as_json: bool) -> NoReturn:
    text = f"reinforge cannot be imported: {type(error).__name__}: {error}"
    if as_json:
        check = {"name": "packages", "state": "broken", "text": text, "fix": INSTALL_AGAIN}
        say_json(without_secrets({"ok": False, "checks": [check]}))
    else:
        say(f"  broken   packages   {text}\n           fix: {INSTALL_AGAIN}")
    raise SystemExit(BROKEN) from error


def _show(check: InstallationCheck) -> None:
    say(f"  {check.state:<8} {check.name:<10} {check.text}")
    if check.fix:
        say(f"           fix: {check.fix}")


def _try_learning(device: str, *, debug: bool, silent: bool) -> InstallationCheck:
    """Runs the self-test; a failure of any kind is a finding, since that is what is looked for."""
    import traceback

    from reinforge.errors import Interrupted, describe_error
    from reinforge.registry import load_named
    from reinforge.runs.progress import open_progress
    from reinforge.runs.summary import format_duration
    from reinforge.trainer.setup.installation import InstallationCheck

    try:
        temporary = tempfile.TemporaryDirectory(prefix="reinforge-doctor-", ignore_cleanup_errors=True)
        with temporary as folder, open_progress(silent=silent) as progress:
            progress.stage(None, "LEARN", None)
            result = load_named(SELF_TEST)(Path(folder), device=device)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001  whatever fails here is broken
        if debug:
            say(traceback.format_exc(), err=True)
        return InstallationCheck("learning", "broken", describe_error(error), REINSTALL)
    return InstallationCheck("learning", "ok", f"{result.text}, in {format_duration(result.seconds)}")
