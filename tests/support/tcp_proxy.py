"""A proxy before a TCP server that can be a bad network: slow, silent, or broken off in the middle of a write."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Self

_CHUNK = 65_536


@dataclass
class Cut:
    """Break a connection off where a client has sent all `patterns`, in this order: before the server has seen the last one, or once it has answered."""

    patterns: tuple[bytes, ...]
    is_answered: bool
    done: threading.Event


class TcpProxy:
    """Forwards connections to 127.0.0.1:`target`, on a port of its own, until `close`.

    `delay_s`: the time by which each answer is late. `accepted`: connections so far. `to_server` and `to_client`: bytes forwarded.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.delay_s = 0.0
        self.accepted = 0
        self.to_server = 0
        self.to_client = 0
        self._is_silent = False
        self._cut: Cut | None = None
        self._wakes = threading.Event()
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Break all off, and listen no longer: connections are refused."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._wakes.set()
        self.cut_all()
        self._accepting.join()

    def be_silent(self) -> None:
        """Accept connections and swallow all that either side sends, from now on."""
        self._is_silent = True

    def be_well(self) -> None:
        """Forward everything at once; connections that have lost bytes are broken off."""
        self.delay_s, self._cut = 0.0, None
        if self._is_silent:
            self._is_silent = False
            self.cut_all()

    def cut_all(self) -> None:
        """Break off the connections that are open."""
        for pair in self._pairs:
            pair.close()

    def cut_before(self, *patterns: bytes) -> threading.Event:
        """Break the next connection off that sends these, in this order; the last one does not arrive. Return what is set then."""
        return self._set_cut(Cut(patterns, False, threading.Event()))

    def cut_after(self, *patterns: bytes) -> threading.Event:
        """Break the next connection off that sends these, in this order, and lose the answer to the last one. Return what is set then."""
        return self._set_cut(Cut(patterns, True, threading.Event()))

    def _set_cut(self, cut: Cut) -> threading.Event:
        self._cut = cut
        return cut.done

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            pair = _Pair(client, server)
            self._pairs = [each for each in self._pairs if not each.is_closed] + [pair]
            for forward in (self._forward_requests, self._forward_answers):
                threading.Thread(target=forward, args=(pair,), daemon=True).start()

    def _forward_requests(self, pair: _Pair) -> None:
        sent = b""
        while data := pair.receive(pair.client):
            if self._is_silent:
                continue
            sent = sent[-64:] + data  # a pattern may come in two pieces
            cut = self._cut
            if cut is not None and pair.has_sent(cut.patterns, sent):
                self._cut = None
                if not cut.is_answered:
                    pair.break_off(cut)
                    return
                pair.cut = cut
            self.to_server += len(data)
            pair.send(pair.server, data)
        pair.close()

    def _forward_answers(self, pair: _Pair) -> None:
        while data := pair.receive(pair.server):
            if pair.cut is not None:
                pair.break_off(pair.cut)
                return
            if self.delay_s:
                self._wakes.wait(self.delay_s)
            if self._is_silent:
                continue
            self.to_client += len(data)
            pair.send(pair.client, data)
        pair.close()


class _Pair:
    """A client's connection and the server's."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.cut: Cut | None = None
        self.is_closed = False
        self._seen = 0

    def has_sent(self, patterns: tuple[bytes, ...], sent: bytes) -> bool:
        """Return whether the client has sent all patterns in their order; `sent` is what came last."""
        while self._seen < len(patterns) and (place := sent.find(patterns[self._seen])) >= 0:
            sent = sent[place + len(patterns[self._seen]) :]
            self._seen += 1
        return self._seen == len(patterns)

    def receive(self, end: socket.socket) -> bytes:
        try:
            return end.recv(_CHUNK)
        except OSError:
            return b""

    def send(self, end: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            end.sendall(data)

    def close(self) -> None:
        self.is_closed = True
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def break_off(self, cut: Cut) -> None:
        """Close both connections, and say that the cut is done."""
        self.close()
        cut.done.set()
