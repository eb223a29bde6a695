"""An agent that runs elsewhere: it is told of each episode, says that it will play it, and posts its result.

Start it with `python examples/agents/service.py 9000`; its recipe has options.url = "http://127.0.0.1:9000/episodes".
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

from calculator import calc


def post(url: str, key: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as response:
        return json.load(response)


class Episodes(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()
        ask, key = f"{episode['base_url']}/chat/completions", episode["api_key"]
        messages, said = episode["task"]["messages"], ""
        for _ in range(3):
            said = post(ask, key, {"model": "policy", "messages": messages})["choices"][0]["message"]["content"]
            call = re.fullmatch(r"calc\((.*)\)", said)
            if call is None:
                break
            messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": calc(call[1])}]
        post(episode["result_url"], key, {"result": said})


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Episodes).serve_forever()
