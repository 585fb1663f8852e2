"""The session that all object clients of this process share. A forked child begins without one."""

from __future__ import annotations

import os
import threading

from .object_session import Session
from .object_types import Error

_sessions: dict[str, Session] = {}
_sessions_lock = threading.Lock()


def join(path: str, name: str) -> Session:
    """The process's session with this sidecar, for one more user. Raises `Error` if the process uses another one."""
    with _sessions_lock:
        for other in [one for one in _sessions.values() if one.off]:
            del _sessions[other.path]
        session = _sessions.get(path)
        if session is None:
            if _sessions:
                raise Error(
                    f"this process already uses the sidecar at {next(iter(_sessions))}; close its clients first"
                )
            session = _sessions[path] = Session(path, name)
            session.start()
        session.users += 1
        return session


def leave(session: Session) -> None:
    """One user less. The last one ends the session."""
    with _sessions_lock:
        session.users -= 1
        if session.users:
            return
        if _sessions.get(session.path) is session:
            del _sessions[session.path]
        session.close()


def _after_fork_in_child() -> None:
    global _sessions_lock
    _sessions.clear()
    _sessions_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
