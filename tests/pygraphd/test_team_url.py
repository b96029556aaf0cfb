from __future__ import annotations

import pytest
import sqlalchemy as sa

from pygraphd.config import load_config, shown
from pygraphd.errors import UsageError
from pygraphd.team_url import TeamUrl, read_team_url

FULL = "postgresql+psycopg://me:p%40ss@db.example:5432/team?sslmode=require&sslpassword=k3y"


def test_its_text_has_no_password() -> None:
    url = read_team_url(FULL, "--team-url")
    assert url.secret == FULL
    for text in (str(url), repr(url), f"{url}"):
        assert "postgresql+psycopg://me:***@db.example:5432/team?sslmode=require&sslpassword=***" in text


@pytest.mark.parametrize(
    "text",
    [
        "postgresql+psycopg:///team?host=/run/postgresql",
        "postgresql+psycopg://me@/team?host=/run/postgresql&port=5433",
        "postgresql+psycopg:////team?host=h",
        "postgresql+psycopg://me@h,other:5/team?options=&sslmode=require",
        "postgresql+psycopg://me@[::1]:5/a%20b#c",
    ],
)
def test_its_text_is_the_same_url(text: str) -> None:
    assert str(read_team_url(text, "--team-url")) == text
    assert sa.make_url(text) == sa.make_url(str(TeamUrl(text)))


def test_a_library_that_quotes_it_does_not_tell_the_password() -> None:
    said = TeamUrl(FULL).hidden_in(f"bad dsn {FULL}: password p@ss (p%40ss), key k3y")
    assert not any(secret in said for secret in ("p@ss", "p%40ss", "k3y"))


def test_settings_have_no_password() -> None:
    config = load_config({"PYGRAPHD_TEAM_URL": FULL}, {})
    assert config.team_url.value == TeamUrl(FULL)
    assert config.team_url.origin == "PYGRAPHD_TEAM_URL"
    assert "p%40ss" not in repr(config) + str(config.settings())
    assert shown("team_url", str(config.settings()["team_url"]["value"])).startswith(
        "postgresql+psycopg://me:***@"
    )


def test_none_is_none() -> None:
    config = load_config({}, {"team_url": " "})
    assert not config.team_url.value
    assert config.settings()["team_url"] == {"value": "", "origin": "--team-url"}
    assert shown("team_url", "") == "none"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql:///team?host=/run/postgresql",
        "postgresql+psycopg://h/team",
        "postgresql://me@[::1]:5/team",
    ],
)
def test_every_form_with_a_host_is_one(text: str) -> None:
    assert read_team_url(text, "x").secret == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sqlite:///s3cret", "expected a URL of PostgreSQL: postgresql.psycopg://ROLE@HOST/DATABASE"),
        ("postgresql+psycopg2://me:s3cret@h/team", "expected a URL of PostgreSQL"),
        ("postgresql://me:s3cret@/team", "names no host"),
        ("postgresql://me:s3cret@h:port/team", "is no URL"),
        ("postgresql://me:s3cret@h/te am", "is no URL"),
        ("postgresql://me:s3cret@h/\x1b[2J", "is no URL"),
        ("postgresql://[::1", "is no URL"),
        ("postgresql:/s3cret?host=/run/postgresql", "is no URL"),
        ("postgresql+psycopg:s3cret?host=h", "is no URL"),
    ],
)
def test_another_is_refused_and_not_quoted(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"PYGRAPHD_TEAM_URL: {message}") as caught:
        load_config({"PYGRAPHD_TEAM_URL": text}, {})
    assert "s3cret" not in str(caught.value)
