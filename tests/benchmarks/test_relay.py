from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from benchmarks.relay import Relay

if TYPE_CHECKING:
    from pathlib import Path


def test_bytes_are_counted_and_passed_on(tmp_path: Path) -> None:
    question, answer = b"q" * 1234, b"a" * 200_000
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(len(question), socket.MSG_WAITALL) == question
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        with Relay(tmp_path / "relay", tmp_path / "server") as relay, socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "relay"))
            client.sendall(question)
            assert client.recv(len(answer), socket.MSG_WAITALL) == answer
        server.join(timeout=10)
    assert (relay.sent, relay.received) == (len(question), len(answer))
