"""Client and daemon find the same places from the same variables."""

from __future__ import annotations

import os
from pathlib import Path

from pygraphd.schema.locations import locate


def test_one_folder_holds_all_of_it_if_asked(tmp_path: Path) -> None:
    places = locate({"PYGRAPHD_HOME": str(tmp_path), "XDG_CACHE_HOME": "/elsewhere"})

    paths = [places.socket, places.lock, places.database, places.log, places.spool]
    assert {path.parent for path in paths} == {tmp_path}


def test_xdg_folders() -> None:
    places = locate({"XDG_RUNTIME_DIR": "/run/user/7", "XDG_CACHE_HOME": "/cache"})

    assert (places.socket, places.lock) == (
        Path("/run/user/7/pygraphd/pygraphd.sock"),
        Path("/run/user/7/pygraphd/pygraphd.lock"),
    )
    assert places.database == Path("/cache/pygraphd/cache.db")


def test_home_is_the_second_choice_for_the_cache() -> None:
    assert locate({"HOME": "/home/ada"}).database == Path("/home/ada/.cache/pygraphd/cache.db")


def test_a_user_without_home_or_runtime_folder_is_served() -> None:
    places = locate({})

    assert places.runtime == places.cache == Path(f"/tmp/pygraphd-{os.getuid()}")


def test_relative_xdg_folders_are_ignored_as_the_standard_says() -> None:
    assert locate({"XDG_RUNTIME_DIR": "run", "XDG_CACHE_HOME": "cache"}) == locate({})


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    places = locate({"PYGRAPHD_HOME": str(deep)})

    assert len(os.fsencode(places.socket)) < 100
    assert places.socket == locate({"PYGRAPHD_HOME": str(deep)}).socket
    assert places.socket != locate({"PYGRAPHD_HOME": str(deep) + "e"}).socket
    assert places.database.parent == deep
