"""`streamrl redis acl`: the rules by which a Redis tells workers, learner, monitors and operators apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from streamrl.errors import ConfigError
from streamrl.protocol.transport.acl import ANY_RUN, ROLES, WEAKER_BEFORE_7, Role, rules


@click.group()
def redis() -> None:
    """Users and rights in Redis."""


@redis.command()
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, help="Only this role; may be repeated.")
@click.option("--run", metavar="NAME", help="Only the keys of this run; by default of every run.")
@click.option("--server", type=click.Choice(["7", "6.2"]), default="7", help="At least this Redis.")
@click.option(
    "--passwords",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="A folder with a file for each role that holds its password.",
)
@click.option("--format", "form", type=click.Choice(["users", "commands"]), default="users")
def acl(roles: tuple[Role, ...], run: str | None, server: str, passwords: Path | None, form: str) -> None:
    """Print the least that each role needs, as users of Redis.

    \b
        streamrl redis acl --passwords DIR > users.acl              a file of users: `aclfile users.acl` in redis.conf
        streamrl redis acl --passwords DIR --format commands | redis-cli
        streamrl redis acl --role monitor --run big                 one role, for one run only

    DIR holds a file for each role, named worker, learner, monitor, operator, with its password; only their SHA-256 is
    printed. Without it users are printed that nobody can be yet. Parts name their user in the URL (redis://worker@host)
    and the password's file in STREAMRL_REDIS_PASSWORD_FILE.

    Printed for all roles, the default user is switched off. With --server 6.2 the rules are weaker; what follows from
    that is said on stderr.
    """
    for role in roles or ROLES:
        password = "" if passwords is None else f"#{_digest(passwords / role)} "
        granted = rules(role, run=run or ANY_RUN, selectors=server != "6.2")
        start = f"user {role} on" if form == "users" else f"ACL SETUSER {role} reset on"
        click.echo(f"{start} {password}{granted}")
        if server == "6.2":
            click.echo(f"note: {role} on Redis 6.2: {WEAKER_BEFORE_7[role]}", err=True)
    if not roles:  # last: who set up the others may be it
        click.echo("user default off" if form == "users" else "ACL SETUSER default off")
    if passwords is None:
        click.echo("note: no passwords yet: give --passwords DIR, or ACL SETUSER NAME >PASSWORD", err=True)


def _digest(file: Path) -> str:
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--passwords: cannot read the password of {file.name}: {error}") from None
    if not password:
        raise ConfigError(f"--passwords: {file} is empty; it must hold the password of {file.name} and nothing else")
    return hashlib.sha256(password.encode()).hexdigest()
