"""`streamrl redis acl`: users of a Redis, each with the least rights that its role needs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from streamrl.protocol.transport.acl import ANY_RUN, ROLES, SERVERS, WEAKER_BEFORE_7, Role, rules
from streamrl.protocol.transport.secret_files import read_passwords


@click.group()
def redis() -> None:
    """Print users and rights for Redis."""


@redis.command()
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, help="Print only this role; repeatable.")
@click.option("--run", metavar="NAME", help="Grant only the keys of this run; default: of every run.")
@click.option("--server", type=click.Choice(["7", "6.2"]), default="7", help="Oldest version of Redis to support.")
@click.option(
    "--passwords",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder with a password file for each role.",
)
@click.option("--format", "form", type=click.Choice(["users", "commands"]), default="users")
def acl(roles: tuple[Role, ...], run: str | None, server: str, passwords: Path | None, form: str) -> None:
    """Print Redis users with the least rights each role needs.

    \b
        streamrl redis acl --passwords DIR > users.acl              a file of users: `aclfile users.acl` in redis.conf
        streamrl redis acl --passwords DIR --format commands | redis-cli
        streamrl redis acl --role monitor --run big                 one role, for one run only

    DIR holds a file with the password for each role, named worker, learner, monitor, operator; only SHA-256 hashes are
    printed. A second line is a second password, for rotation. Without DIR the printed users cannot log in yet. Parts
    name their user in the URL (redis://worker@host) and the password's file in STREAMRL_REDIS_PASSWORD_FILE. If DIR has
    a file `replica` or `sentinel`, that server user is printed too.

    If you print all roles, the default user is switched off. With --server 6.2 the rules are weaker; stderr says what
    follows.
    """
    shown = roles or ROLES
    users: dict[str, str] = {role: rules(role, run=run or ANY_RUN, selectors=server != "6.2") for role in shown}
    if not roles and passwords is not None:
        users |= {name: rights for name, rights in SERVERS.items() if (passwords / name).exists()}
    lines = [_user(name, rights, passwords, form) for name, rights in users.items()]
    # A file that is cut short must not leave the default user on; commands may come over that user's own connection.
    if not roles:
        lines = ["user default off", *lines] if form == "users" else [*lines, "ACL SETUSER default off"]
    click.echo("\n".join(lines))
    for role in shown if server == "6.2" else ():
        click.echo(f"note: {role} on Redis 6.2: {WEAKER_BEFORE_7[role]}", err=True)
    if passwords is None:
        click.echo("note: no passwords yet: give --passwords DIR, or ACL SETUSER NAME >PASSWORD", err=True)


def _user(name: str, granted: str, passwords: Path | None, form: str) -> str:
    known = "" if passwords is None else "".join(f"#{digest} " for digest in _digests(passwords / name))
    start = f"user {name} on" if form == "users" else f"ACL SETUSER {name} reset on"
    return f"{start} {known}{granted}"


def _digests(file: Path) -> list[str]:
    return [
        hashlib.sha256(password.encode()).hexdigest() for password in read_passwords(file, key=f"--passwords: {file}")
    ]
