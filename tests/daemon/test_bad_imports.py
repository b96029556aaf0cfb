"""Files and requests that are no sound exports: each is refused as a whole, with its line and why, and nothing of it is stored."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import main
from pygraphd.schema.keys import KEY_VERSION
from pygraphd.schema.messages import IMPORT_PATH
from pygraphd.schema.portable import FORMAT, FORMAT_VERSION, MAX_LINE_BYTES, MAX_REQUEST_ENTRIES
from tests.support.daemon_home import Home
from tests.support.shipped_rows import FASTER, KERNELS, row

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.daemon

HEADER = {"format": FORMAT, "version": FORMAT_VERSION, "keys": KEY_VERSION, "pygraphd": "0.1.0", "entries": 2}
ENTRY: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(row("a", KERNELS, FASTER))))
GONE = object()


def changed(value: dict[str, Any], path: str, new: object) -> dict[str, Any]:
    """Return a value with another one at a path; `GONE`: with none."""
    copied = json.loads(json.dumps(value))
    *folders, name = [int(part) if part.isdecimal() else part for part in path.split(".")]
    inner = copied
    for part in folders:
        inner = inner[part]
    if new is GONE:
        del inner[name]
    else:
        inner[name] = new
    return copied  # type: ignore[no-any-return]


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


MEASURED = "record.measurements"
BAD_SIZES: list[object] = [[1.5], [2**63], [0] * 65, [None], "12", {"0": 1}]
BAD_PARTS: list[tuple[str, object]] = [
    *((part, None) for part in ("environment", "origin", "record", "record.graph", "record.decision")),
    *((part, GONE) for part in ("environment", "origin", "record", "record.graph.kind", "record.decision.policy")),
    *(("environment.sm_count", bad) for bad in (-1, "132", True, 1.5, float("inf"), 10**4000, GONE)),
    *(("environment.gpu", bad) for bad in ("\x1b[31m", "\ud800", "x" * 10_000, None, ["H100"], "a\nb")),
    ("origin.host", "\x00"),
    ("origin.host", "h" * 257),
    ("origin.version", 1),
    *(("record.graph.digest", bad) for bad in ("A" * 64, "a" * 63, "../../etc/passwd", "", 0, "é" * 64)),
    ("record.graph.kind", "sideways"),
    ("record.graph.partition", 1),
    ("record.graph.partitions", 0),
    ("record.graph.operators", -1),
    *(("record.graph.sizes", bad) for bad in BAD_SIZES),
    *(("record.decision.deployment", bad) for bad in ("TREES", "graph", None, 1, ["GRAPH"])),
    *(("record.decision.policy", bad) for bad in (-1, True, "4", float("nan"), 10**7)),
    *(("record.decision.final", bad) for bad in (False, "yes", 1, None)),
    ("record.decision.calls", -1),
    ("record.decision.reason", "fast"),
    (f"{MEASURED}.0.samples", 0),
    *((f"{MEASURED}.0.median_us", bad) for bad in (float("nan"), -float("inf"), -1, 1e300, "1", None)),
    (f"{MEASURED}.1.busy", 2),
    (f"{MEASURED}.1.deployment", "KERNELS"),
    (MEASURED, {}),
    (MEASURED, []),  # and a time at which they were taken
    *(("measured_at", bad) for bad in (None, -1, float("nan"), 1e300, "yesterday", True, GONE)),
]  # fmt: skip
BAD_ENTRIES = [
    *(changed(ENTRY, path, new) for path, new in BAD_PARTS),
    *(None, [], 1, "entry", True, {}, [ENTRY], {"entries": [ENTRY]}),
]
SOUND = lines(HEADER, ENTRY, ENTRY)
BAD_FILES = [
    *(b"", b"\n", b"\0" * 5000, b"gpu,graph\nH100,a\n", b"<html></html>\n", b"SQLite format 3\0" + bytes(4080)),
    *(gzip.compress(SOUND), gzip.compress(SOUND)[:-9], zlib.compress(SOUND), SOUND.decode().encode("utf-16")),
    *(SOUND.replace(b"\n", b"\0"), SOUND.replace(b"H100", b"H\xff00"), SOUND.replace(b"\n", b"\r")),
    *(SOUND[:cut] for cut in (1, 50, SOUND.index(b"\n"), SOUND.index(b"\n") + 1, -1)),
    *(SOUND + more for more in (b"\n", b"x", SOUND, lines(ENTRY))),
    *(lines(ENTRY, ENTRY), lines([HEADER, ENTRY]), lines(HEADER, HEADER, ENTRY), lines(HEADER, ENTRY)),
    *(json.dumps([HEADER, ENTRY, ENTRY], indent=2).encode(), b"[" * 100_000 + b"\n"),
    *(lines(HEADER, ENTRY) + line + b"\n" for line in (b"[" * 60_000, b'{"a":' * 10_000, b"9" * 5000)),
    lines(HEADER, ENTRY) + b" " * (MAX_LINE_BYTES + 1) + b"\n",
    *(
        lines(changed(HEADER, name, bad), ENTRY, ENTRY)
        for name, values in {
            "format": (GONE, None, "tar", 1, FORMAT.upper()),
            "version": (GONE, None, 0, -1, FORMAT_VERSION + 1, "3", True, float("nan"), 10**4000),
            "keys": (GONE, None, KEY_VERSION + 1, 0, "1", 0.5),
            "entries": (GONE, None, 0, 1, 3, -1, 10**30, "2", 2.5),
            "pygraphd": (GONE, None, "\x1b", "x" * 65),
        }.items()
        for bad in values
    ),
]  # fmt: skip


def test_these_are_more_than_fifty_of_each() -> None:
    assert min(len(BAD_ENTRIES), len(BAD_FILES)) >= 50


@pytest.mark.parametrize("data", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_refused(
    imports: _Imports, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    (tmp_path / "known.jsonl").write_bytes(data)

    imports.refuse(tmp_path / "known.jsonl", capsys)


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=range(len(BAD_ENTRIES)))
def test_a_bad_entry_is_refused_with_all_others(
    imports: _Imports, tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: object
) -> None:
    (tmp_path / "known.jsonl").write_bytes(lines(HEADER, ENTRY, entry))

    told = imports.refuse(tmp_path / "known.jsonl", capsys)
    assert "line 3: " in told
    status, answer = imports.home.ask("POST", IMPORT_PATH, json.dumps({"entries": [ENTRY, entry]}).encode())
    assert (status, set(answer)) == (400, {"error"})
    assert imports.stored() == 0


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"[]", b"{}", b'{"entries": 1}', b'{"entries": null}', b'{"entries": {"0": {}}}'),
        json.dumps({"entries": [ENTRY] * (MAX_REQUEST_ENTRIES + 1)}).encode(),
        json.dumps({"entries": [ENTRY]}).encode()[:-1],
        b'{"entries": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_a_bad_request_is_refused(imports: _Imports, body: bytes) -> None:
    status, answer = imports.home.ask("POST", IMPORT_PATH, body)
    assert (status, set(answer)) == (400, {"error"})
    assert imports.stored() == 0


def test_what_the_bad_ones_are_made_of_is_sound(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.start()
    (tmp_path / "known.jsonl").write_bytes(SOUND)
    monkeypatch.setenv("PYGRAPHD_HOME", str(home.path))
    with pytest.raises(SystemExit) as ended:
        main(["cache", "import", str(tmp_path / "known.jsonl")])
    assert (ended.value.code, capsys.readouterr().err) == (0, "")
    assert _Imports(home).stored() == 1
    assert home.ask("POST", IMPORT_PATH, json.dumps({"entries": [ENTRY]}).encode())[0] == 200


@dataclasses.dataclass(frozen=True)
class _Imports:
    """Imports into the cache of a running daemon."""

    home: Home

    def refuse(self, file: Path, capsys: pytest.CaptureFixture[str]) -> str:
        """Import a file that is to be refused in one line, which is returned."""
        with pytest.raises(SystemExit) as ended:
            main(["cache", "import", str(file)])
        captured = capsys.readouterr()
        assert (ended.value.code, captured.out) == (2, "")
        assert captured.err.startswith(f"pygraphd: {file}: ")
        assert captured.err.endswith("; nothing was imported\n")
        assert captured.err[:-1].isprintable()
        assert self.stored() == 0
        return captured.err

    def stored(self) -> int:
        """Return the number of entries that the daemon has; it must be there, and have met no fault of its own."""
        assert b"Traceback" not in self.home.locations.log.read_bytes()
        entries = self.home.ask("GET", "/v1/stats")[1]["entries"]
        assert isinstance(entries, int)
        return entries


@pytest.fixture
def imports(shared_home: Home, monkeypatch: pytest.MonkeyPatch) -> _Imports:
    monkeypatch.setenv("PYGRAPHD_HOME", str(shared_home.path))
    return _Imports(shared_home)
