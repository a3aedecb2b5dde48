"""``windtunnel``: gathers the verbs and turns errors into one sentence and an exit status.

Exit status: 0 done, 1 the user's program or the host failed, 2 the user's input is wrong, 3 what came out is
what ``--fail-on`` names, or less than was asked for, 130 interrupted.
"""

import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar

import typer

from windtunnel import __version__
from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.capabilities import CAPABILITIES
from windtunnel.cli import Lazy

OF_ALL = ("advise", "replay", "runs", "graph", "cluster", "network", "calibrate")


class Verbs(Lazy):
    """First the verbs of the capabilities, then those of all runs. Each is in the module of its name."""

    table: ClassVar[Mapping[str, str]] = {
        **{verb: verb for capability in CAPABILITIES for verb in capability.verbs},
        "host": "train:host",
        **{verb: verb for verb in OF_ALL},
    }

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("windtunnel: interrupted; finished runs are kept", err=True)
            raise typer.Exit(130) from None
        except ModuleNotFoundError as error:
            raise _missing(error, ctx.invoked_subcommand) from error
        except WindtunnelError as error:
            flags = _flags(self.commands[ctx.invoked_subcommand])
            error.args = (re.sub(r"`(\w+)`", lambda name: flags.get(name[1], name[0]), str(error)),)
            raise


def _flags(command: Any) -> dict[str, str]:
    """The options of a verb, and of those below it, by the names of their parameters: messages have these
    between backticks, as Python's callers know them. An argument is written in capitals."""
    below = [_flags(verb) for verb in getattr(command, "commands", {}).values()]
    own = {
        parameter.name: max(parameter.opts, key=len)
        if parameter.param_type_name == "option"
        else parameter.name.upper()
        for parameter in command.params
    }
    return {name: flag for flags in (*below, own) for name, flag in flags.items()}


def _missing(error: ModuleNotFoundError, verb: str) -> Exception:
    """The sentence for a package that is not installed, with the extra of the innermost capability that was
    at work, or else of the verb; the error itself where it is a module of windtunnel."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "windtunnel"):
        return error
    at_work = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    extras = [entry.extra for entry in CAPABILITIES if verb in entry.verbs] or ["train"]
    for module in at_work:
        extras += [entry.extra for entry in CAPABILITIES if f"{module}.".startswith(f"{entry.package}.")]
    return UserError(
        f"{verb}: the Python package {name!r} is not installed, "
        f"pip install 'windtunnel[{extras[-1]}]' brings all that this needs"
    )


app = typer.Typer(
    name="windtunnel",
    cls=Verbs,
    help="Put a real training job, serving policy or agent sandbox into a cluster that you do not have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Panels leave little room for words at 80 columns, and cut names.
    rich_markup_mode=None,
    add_completion=True,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"windtunnel {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except WindtunnelError as error:
        if error.details:
            typer.echo(error.details.rstrip(), err=True)
        typer.echo(f"windtunnel: {error}", err=True)
        sys.exit(error.status)
