from __future__ import annotations

import os
import subprocess
import sys
from configparser import ConfigParser
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli.systemd import units, units_text
from pygraphd.errors import UsageError
from pygraphd.schema.locations import locate
from tests.support.required import require

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DOCUMENTED = {
    "Unit": {"Description", "Documentation", "Requires", "Wants", "BindsTo", "PartOf", "After", "Before"},
    "Socket": {"ListenStream", "SocketMode", "DirectoryMode", "Accept", "Service", "RemoveOnStop", "Backlog"},
    "Service": {
        *("Type", "ExecStart", "ExecReload", "ExecStop", "Restart", "RestartSec", "WorkingDirectory"),
        *("Environment", "UMask", "NoNewPrivileges", "KillMode", "TimeoutStopSec", "Nice"),
    },
    "Install": {"WantedBy", "RequiredBy", "Also", "Alias"},
}
"""Names in systemd.unit(5), systemd.socket(5), systemd.service(5) and systemd.exec(5); systemd ignores a name that it does not know."""


def read(text: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=False)  # a name may come again
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def verified(folder: Path, texts: Mapping[str, str]) -> tuple[int, list[str]]:
    """Return the exit code of systemd's own verifier, which needs no running systemd, and what it says of our units.

    It reads the units, and looks for the program and for the units that they name.
    """
    verifier = require(["systemd-analyze"], "TESTS_REQUIRE_SYSTEMD")
    for unit, text in texts.items():
        (folder / unit).write_text(text)
    done = subprocess.run(
        [verifier, "--user", "verify", *(folder / unit for unit in texts)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    # It looks at the units of this machine, too, as far as ours depend on them.
    return done.returncode, [
        line for line in f"{done.stdout}{done.stderr}".splitlines() if "pygraphd" in line
    ]


@pytest.mark.parametrize("name", ["home", 'a b 100% $x\\t"q"'])
def test_systemd_finds_nothing_wrong(tmp_path: Path, name: str) -> None:
    environ = {"PYGRAPHD_HOME": str(tmp_path / name)}
    assert verified(tmp_path, units(locate(environ), environ)) == (0, [])


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("UMask=0077", "Umask=0077", "Umask"),
        ("[Install]", "[Instal]", "Instal"),
        ("SocketMode=0600", "SocketMode=private", "private"),
        ("ListenStream=/", "ListenStream=", "pygraphd.socket"),
        (f'"{sys.executable}"', "/nowhere/python", "/nowhere/python"),
        ("Restart=on-failure", "Restart=when-needed", "when-needed"),
    ],
)
def test_systemd_refuses_a_unit_that_is_not_valid(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    """Else its verdict on ours would mean nothing."""
    environ = {"PYGRAPHD_HOME": str(tmp_path / "home")}
    sound = units(locate(environ), environ)
    texts = {unit: text.replace(right, wrong) for unit, text in sound.items()}
    assert texts != sound

    code, told = verified(tmp_path, texts)
    assert (code, told) != (0, [])
    assert any(said in line for line in told), told


def test_units_have_only_what_systemd_knows() -> None:
    environ = {"PYGRAPHD_HOME": "/a", "XDG_CACHE_HOME": "/b", "XDG_CONFIG_HOME": "/c"}
    texts = units(locate(environ), environ)
    for name, text in texts.items():
        parser = read(text)
        kind = name.rpartition(".")[2].capitalize()
        assert parser.sections() == ["Unit", kind, "Install"]
        for section in parser.sections():
            assert set(parser[section]) <= DOCUMENTED[section]
    service, socket = read(texts["pygraphd.service"]), read(texts["pygraphd.socket"])
    for word in ("Requires", "After"):
        assert service["Unit"][word] == "pygraphd.socket"
    assert service["Install"]["Also"] == "pygraphd.socket"
    assert socket["Install"]["WantedBy"] == "sockets.target"
    assert texts["pygraphd.service"].count("\nEnvironment=") == 3


def test_the_socket_is_where_programs_look() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/1000", "HOME": "/home/me"}
    texts = units(locate(environ), environ)
    assert read(texts["pygraphd.socket"])["Socket"]["ListenStream"] == "/run/user/1000/pygraphd/pygraphd.sock"
    service = read(texts["pygraphd.service"])["Service"]
    assert service["ExecStart"] == f'"{sys.executable}" -m pygraphd start --foreground'
    assert "Environment" not in service


def test_names_that_systemd_would_read_otherwise_are_escaped() -> None:
    environ = {"PYGRAPHD_HOME": '/a b/100%/"q"'}
    texts = units(locate(environ), environ)
    assert 'Environment="PYGRAPHD_HOME=/a b/100%%/\\"q\\""\n' in texts["pygraphd.service"]
    assert 'ListenStream=/a b/100%%/"q"/pygraphd.sock\n' in texts["pygraphd.socket"]
    with pytest.raises(UsageError, match="a unit cannot name it"):
        units(locate({"PYGRAPHD_HOME": "/a\nExecStart=/bin/sh"}), {"PYGRAPHD_HOME": "/a\nExecStart=/bin/sh"})


def test_where_a_service_would_look_elsewhere_there_are_no_units() -> None:
    with pytest.raises(UsageError, match="XDG_RUNTIME_DIR is not set"):
        units(locate({"HOME": "/home/me"}), {"HOME": "/home/me"})


def test_each_unit_says_where_it_belongs() -> None:
    text = units_text({"a.socket": "[Unit]\n", "a.service": "[Service]\n"}, "~/units")
    assert text == "# ~/units/a.socket\n[Unit]\n\n# ~/units/a.service\n[Service]"
