"""Inside the wall around an agent: 127.0.0.1 leads to one socket outside. Its text is handed to an interpreter with -c.

Owns: the only way out of that wall, and the start of the agent as its child. Refuses: every other address, which the
network namespace does not have; importing anything but the standard library.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading

CHUNK_BYTES = 1 << 16
MOST_TASKS = 320
"""Processes and threads of an agent. Above the number of processes at which its supervisor ends it: this is the stop
that holds until then."""


def pump(source: socket.socket, target: socket.socket) -> None:
    """Until one side ends; then the other hears of it."""
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            end.close()


def serve(listener: socket.socket, path: str) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
        except OSError:  # the run has ended
            client.close()
            continue
        for pair in ((client, server), (server, client)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def main(port: str, path: str, *command: str) -> None:
    """Listens before the agent starts, and ends as it ends."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", int(port)))
    listener.listen(128)
    agent = os.fork()
    if agent == 0:
        listener.close()
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = MOST_TASKS if hard == resource.RLIM_INFINITY else min(MOST_TASKS, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started behind the wall: {error}", file=sys.stderr, flush=True)
            os._exit(127)
    for stream in (0, 1):  # the agent's alone: its output ends when it closes it
        os.close(stream)
    threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
