"""`streamrl`: finds the command, and turns errors into exit codes.

A user's mistake is one line on stderr and exit code 2, as is a file that the system does not let us read or write.
Other errors that streamrl raises deliberately exit with 1, Ctrl-C with 130, a closed output pipe with 141. Any other
exception is a bug and keeps its traceback. Commands are imported when called (`commands`), so this module imports
nothing heavier than click.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from streamrl import __version__
from streamrl.errors import ResourceError, StreamrlError, UserError
from streamrl.ops.cli.commands import COMMANDS, CommandEntry

EXIT_INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C
EXIT_UNREAD = 141  # likewise for a closed pipe, as with `head`: 1 means something else in several commands
# Errors that any path may raise at any time; each command handles missing paths itself.
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}
_REFUSALS |= {errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOTCONN}  # the last: of networks
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


class LazyGroup(click.Group):
    """A group whose commands are known by name and imported when called."""

    def __init__(self, *, entries: Mapping[str, CommandEntry], **settings: Any) -> None:
        super().__init__(**settings)
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._entries:
            return None
        module, _, attribute = self._entries[cmd_name].target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), f"{self._entries[cmd_name].target} is not a click command"
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())  # buffered output is flushed at exit
            ctx.exit(EXIT_UNREAD)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_named = args[0] in self._entries or args[0].startswith("-")
        if not is_named and not ctx.resilient_parsing:  # else a shell completes a line, and nobody reads the error
            nearest = get_close_matches(args[0], self._entries, n=1, cutoff=0.6)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self._entries.items()])


def _replace_unencodable_characters() -> None:
    """Print a question mark for characters that a terminal or file cannot encode, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def was_interrupted(error: Exception) -> bool:
    """Whether Ctrl-C came while a command was imported.

    pydantic-core, which builds schemas then, wraps it in its own error, whose last line names the cause.
    """
    return str(error).rstrip().endswith("KeyboardInterrupt:")


def refusal(error: OSError) -> ResourceError | None:
    """Return the error as one for the user to fix; None if it is a bug."""
    if error.filename is None or error.errno not in _REFUSALS:
        return None
    return ResourceError(f"{error.filename}: {error.strerror}")


def _report_misuse(error: click.ClickException) -> int:
    error.show()
    if isinstance(error, click.NoSuchOption) and "." in error.option_name:
        click.echo(f"Settings have no dashes: {error.option_name.lstrip('-')}=VALUE", err=True)
    return error.exit_code


def _report_abort(error: BaseException) -> int:
    if not isinstance(error.__context__, EOFError):
        return EXIT_INTERRUPTED
    click.echo("\nerror: the input ended before a question was answered; an option can answer it, see --help", err=True)
    return UserError.exit_code


def main(argv: Sequence[str] | None = None, *, commands: Mapping[str, CommandEntry] = COMMANDS) -> int:
    """Run the command line and return the exit code. Raises only for bugs."""

    @click.group("streamrl", cls=LazyGroup, entries=commands, context_settings=_SETTINGS)
    @click.version_option(__version__, prog_name="streamrl")
    def group() -> None:
        """Asynchronous, off-policy, streaming reinforcement learning for language models.

        \b
        Train a small model, on any machine with two cores:
            streamrl quickstart
        Run a configuration on this machine, with settings overridden:
            streamrl up conf/pretrained.yaml model.path=./sft data.train=prompts.jsonl data.validation=held-out.jsonl
        Watch a run from anywhere, and ask what holds it back:
            streamrl top RUN_FOLDER
            streamrl why --redis redis://host:6379 --run NAME
        See every setting of a configuration, and where each value comes from:
            streamrl config show conf/quickstart.yaml optimizer.lr=1e-4

        Every command that takes a configuration also takes settings as KEY.SUB=VALUE;
        conf/reinforce.yaml explains them all. streamrl ships the files in conf/, and finds them by
        name from any folder, also in `extends`. For details use `streamrl COMMAND --help`.
        """

    _replace_unencodable_characters()
    try:
        result = group.main(args=None if argv is None else list(argv), prog_name="streamrl", standalone_mode=False)
    except click.ClickException as error:
        return _report_misuse(error)
    except (click.Abort, KeyboardInterrupt) as error:
        return _report_abort(error)
    except StreamrlError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except OSError as error:
        if (user_error := refusal(error)) is None:
            raise
        click.echo(f"error: {user_error}", err=True)
        return user_error.exit_code
    except Exception as error:
        if not was_interrupted(error):
            raise
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
