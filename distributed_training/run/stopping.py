"""Ctrl-C, SIGTERM and SIGHUP, which stop a run after the step that it is in."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 10.0  # after a signal, further ones count only when this has passed


class Stopping:
    """While its block lasts, the first signal is kept as `signum` (0: none came) and said."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.signum, self._received_at = 0, 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        # One that is ignored, as a hang-up is under nohup, stays so.
        signals = [s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        self._handlers = {signum: signal.signal(signum, self.receive) for signum in signals}

    def __exit__(self, *_error: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def receive(self, signum: int, _frame: Any) -> None:
        """Launchers pass a terminal's Ctrl-C on and follow it with SIGTERM, so only a signal that
        comes later means that the user will not wait."""
        now = time.monotonic()
        if not self.signum:
            self.signum, self._received_at = signum, now
            self.say(f"{signal.Signals(signum).name}: stopping after this step")
        elif now - self._received_at > PATIENCE_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
