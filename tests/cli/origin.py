"""A server for the tests of --net: serves a directory on the loopback, and notes each request.

usage: origin.py DIR NOTES [CERT]
Writes its port into DIR/port. Each request adds a line to NOTES. With CERT it speaks TLS.
"""
import functools, http.server, os, ssl, sys

root, notes = sys.argv[1], sys.argv[2]


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        with open(notes, "a") as file:
            file.write(f"{self.command} {self.path} {self.headers.get('Host')}\n")


handler = functools.partial(Handler, directory=root)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
if len(sys.argv) > 3:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[3])
    server.socket = context.wrap_socket(server.socket, server_side=True)
with open(f"{root}/port.new", "w") as file:
    file.write(str(server.server_port))
os.rename(f"{root}/port.new", f"{root}/port")
server.serve_forever()
