"""A service with a memory: svc.py PORT. /add/N counts up, /peek tells the count, /work/N computes N
steps after it has answered, /result waits for them and tells what came out."""

import http.server
import sys
import threading


class Service(http.server.BaseHTTPRequestHandler):
    count = 0
    result = 1
    worker = threading.Thread()

    def do_GET(self) -> None:
        verb, _, number = self.path[1:].partition("/")
        if verb == "add":
            Service.count += int(number)
        elif verb == "work":
            self.wait()
            Service.worker = threading.Thread(target=self.compute, args=(int(number),))
            Service.worker.start()
        elif verb == "result":
            self.wait()
        content = {"result": Service.result, "work": number}.get(verb, Service.count)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{content}\n".encode())

    def wait(self) -> None:
        if Service.worker.ident:
            Service.worker.join()

    def compute(self, steps: int) -> None:
        value = Service.result
        for _ in range(steps):
            value = (value * 1103515245 + 12345) % 2**31
        Service.result = value

    def log_message(self, *_: object) -> None:
        pass


port = int(sys.argv[1])
http.server.HTTPServer(("127.0.0.1", port), Service).serve_forever()
