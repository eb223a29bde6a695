"""An agent that runs elsewhere: it is told of each episode, says that it will play it, and posts how that ended.

Start it with `python examples/agents/service.py 9000`; its recipe has options.url = "http://127.0.0.1:9000/episodes".
It asks and posts wherever an order says: EPISODES_KEY, which options.key_variable names, is what an order must show. It
has to be set where others reach the service: `service.py 9000 0.0.0.0`.
"""

import contextlib
import hmac
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plain_http import post, solve

KEY = os.environ.get("EPISODES_KEY", "")
SHOWN = f"Bearer {KEY}" if KEY else ""


class Episodes(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), SHOWN.encode()):
            return self.send_error(401)
        episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.wfile.write(b"HTTP/1.0 202 Accepted\r\nContent-Length: 0\r\n\r\n")
        try:
            end = {"result": solve(episode["task"], episode["base_url"], episode["api_key"])}
        except Exception as error:  # such as 403 at a limit. Untold, it would be a timeout
            end = {"error": str(error)}
        with contextlib.suppress(OSError):  # 400 to an error, 401 to what comes too late
            post(episode["result_url"], episode["api_key"], end)


if __name__ == "__main__":
    host = sys.argv[2] if sys.argv[2:] else "127.0.0.1"
    if host != "127.0.0.1" and not KEY:
        sys.exit(f"whoever reaches {host} could give orders: set EPISODES_KEY")
    ThreadingHTTPServer((host, int(sys.argv[1])), Episodes).serve_forever()
