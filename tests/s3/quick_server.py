"""An S3 emulator in a process of its own; run as a script.

Prints one JSON line `{"endpoint": …, "access_key": …, "secret_key": …}` when it serves on a free port of loopback,
and ends when its standard input does, so it never outlives the process that started it.
"""

import json
import logging
import sys

from moto.server import ThreadedMotoServer


def main() -> None:
    """Serve until standard input ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(
        json.dumps({"endpoint": f"http://{host}:{port}", "access_key": "test", "secret_key": "testsecret"}), flush=True
    )
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
