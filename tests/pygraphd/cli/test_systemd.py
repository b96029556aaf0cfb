from __future__ import annotations

import sys
from configparser import ConfigParser

import pytest

from pygraphd.cli.systemd import units, units_text
from pygraphd.errors import UsageError
from pygraphd.schema.locations import locate


def read(text: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.read_string(text)
    return parser


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
