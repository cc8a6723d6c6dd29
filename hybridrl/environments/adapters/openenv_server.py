"""A server of an OpenEnv app on loopback: `Server` starts it, and this module is what it runs.

`openenv_server LIFELINE DESCRIPTOR package.module:app`; the descriptor is a socket that listens already.
"""

import os
import socket
import sys

from hybridrl import child_process


class Server:
    """The server for all environments of this process that play with one app; ends with the last of them."""

    _running: dict[str, "Server"] = {}

    def __init__(self, app: str):
        self._app, self._users = app, 0
        with socket.create_server(("127.0.0.1", 0)) as listening:  # clients wait in its queue until the app is up
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self._process, self._lifeline = child_process.start(
                "hybridrl.environments.adapters.openenv_server", [listening.fileno()], (app,))

    @classmethod
    def join(cls, app: str) -> "Server":
        """The server of an app, started when none runs. Every `join` needs a `leave`."""
        server = cls._running.get(app)
        if server is None or server._process.poll() is not None:
            server = cls._running[app] = cls(app)
        server._users += 1
        return server

    def leave(self) -> None:
        """One environment less needs it."""
        self._users -= 1
        if self._users:
            return
        if self._running.get(self._app) is self:
            del self._running[self._app]
        if self._process.poll() is None:
            child_process.kill_group(self._process.pid)
        self._process.wait()
        os.close(self._lifeline)

    def ended(self) -> str:
        """How it ended, or nothing while it runs."""
        status = self._process.poll()
        return "" if status is None else f"it ended ({child_process.exit_status(status)}); its output says why"


def main() -> None:
    """Serve until killed."""
    lifeline, listening = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    child_process.die_with(lifeline)
    import uvicorn

    # No pings: they are not answered while the engine's loop is not running.
    config = uvicorn.Config(sys.argv[3], log_level="warning", ws_ping_interval=None)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
