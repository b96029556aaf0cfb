"""Stands in for the questions to a device that there is not: it has nothing to do, and may be waited for."""

from __future__ import annotations

from pygraphd.client.recording.device_waits import DeviceWaits


class IdleDevice(DeviceWaits):
    """Answers without asking the device."""

    def __init__(self) -> None:  # it has no recorder
        pass

    def may_wait(self) -> bool:
        """Return True: nobody waits for anything."""
        return True
