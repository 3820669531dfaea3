"""A one-node Ceph object gateway on loopback, in memory; run as a script with an empty folder for its state.

Needs the Debian packages ceph-mon, ceph-osd, radosgw and ceph-common. Prints one JSON line
`{"endpoint": …, "access_key": …, "secret_key": …}` when it serves, and ends with all its daemons when its standard
input does. The daemons run in the foreground as its children and die with it, however it dies. cephx stays on: the
gateway loops without it. Pools are made by the gateway itself.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool", "setpriv")
ACCESS_KEY, SECRET_KEY = "test", "testsecret"
START_SECONDS = 240.0
CONFIGURATION = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = v2:127.0.0.1:{mon_port}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
auth_allow_insecure_global_id_reclaim = true
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 2000
osd_crush_chooseleaf_type = 0
run_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
pid_file = {folder}/run/$name.pid
log_file = {folder}/log/$name.log
setuser_match_path =
[mon]
mon_data = {folder}/mon
mon_cluster_log_file = /dev/null
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
mon_data_avail_warn = 2
mon_data_avail_crit = 1
[osd]
osd_data = {folder}/osd
keyring = {folder}/osd/keyring
osd_objectstore = memstore
memstore_device_bytes = {memory_bytes}
osd_memory_target = 1073741824
[client]
keyring = {folder}/keyring
[client.admin]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_data = {folder}/rgw
rgw_run_sync_thread = false
rgw_dynamic_resharding = false
rgw_override_bucket_index_max_shards = 1
rgw_gc_max_objs = 1
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 2
rgw_lc_max_objs = 1
rgw_data_log_num_shards = 1
rgw_usage_max_shards = 1
"""


def free_ports(number: int) -> list[int]:
    """Return ports of loopback nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def memory_bytes() -> int:
    """Return how much the store may hold; it hangs writes when it is full."""
    return int(os.environ.get("CEPH_MEMORY_BYTES", 2 * 1024**3))


class CephServer:
    """The daemons of one cluster whose state is in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Write the configuration; nothing runs yet."""
        self.folder = folder.absolute()
        self.port, mon_port = free_ports(2)
        self.monitor = f"[v2:127.0.0.1:{mon_port}]"
        self.fsid = str(uuid.uuid4())
        self.daemons: list[subprocess.Popen[bytes]] = []
        for name in ("mon", "osd", "run", "log", "rgw"):
            (self.folder / name).mkdir(parents=True)
        text = CONFIGURATION.format(
            fsid=self.fsid, mon_port=mon_port, port=self.port, folder=self.folder, memory_bytes=memory_bytes()
        )
        (self.folder / "ceph.conf").write_text(text)

    def start(self) -> None:
        """Start monitor, storage daemon and gateway, and wait until the gateway serves."""
        keyring = str(self.folder / "keyring")
        caps = ["--cap", "mon", "allow *"]
        self.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *caps)
        caps += ["--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
        self.run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *caps)
        self.start_monitor(keyring)
        self.start_storage()
        user = ["--uid=test", "--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        self.run("radosgw-admin", *self.conf, "-n", "client.admin", "user", "create", *user)
        self.daemon("radosgw", "-n", "client.admin")
        self.wait_until_served()

    def start_monitor(self, keyring: str) -> None:
        """Make a map of one monitor and start it."""
        monmap = str(self.folder / "monmap")
        self.run("monmaptool", "--create", "--addv", "a", self.monitor, "--fsid", self.fsid, monmap)
        self.run("ceph-mon", *self.conf, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self.daemon("ceph-mon", "-i", "a")

    def start_storage(self) -> None:
        """Register one storage daemon, make its memory store and start it."""
        identity, key = str(uuid.uuid4()), self.run("ceph-authtool", "--gen-print-key").strip()
        secret = json.dumps({"cephx_secret": key})
        self.run("ceph", *self.conf, "osd", "new", identity, "0", "-i", "-", stdin=secret)
        keyring = str(self.folder / "osd" / "keyring")
        self.run("ceph-authtool", "--create-keyring", keyring, "--name", "osd.0", "--add-key", key)
        self.run("ceph-osd", *self.conf, "-i", "0", "--mkfs", "--osd-uuid", identity)
        self.daemon("ceph-osd", "-i", "0")

    def stop(self) -> None:
        """End the daemons, the last one first; nothing is worth saving."""
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait()

    @property
    def conf(self) -> list[str]:
        """Options that name the configuration."""
        return ["-c", str(self.folder / "ceph.conf")]

    def run(self, *command: str, stdin: str = "") -> str:
        """Run one program to its end; raise with its last words where it fails."""
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=START_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:3])}: exit {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def daemon(self, program: str, *options: str) -> None:
        """Start a daemon in the foreground that is killed when this process dies."""
        with (self.folder / "log" / f"{program}.out").open("wb") as out:
            command = ["setpriv", "--pdeathsig", "KILL", program, *self.conf, "-f", *options]
            self.daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out))

    def wait_until_served(self) -> None:
        """Return when the gateway accepts connections."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if any(daemon.poll() is not None for daemon in self.daemons):
                break
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        words = "".join(path.read_text()[-1000:] for path in (self.folder / "log").glob("*.out"))
        raise RuntimeError(f"the object gateway does not serve: {words}")


def main() -> None:
    """Serve until standard input ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    server = CephServer(Path(sys.argv[1]))
    try:
        server.start()
        served = {"endpoint": f"http://127.0.0.1:{server.port}", "access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
        print(json.dumps(served), flush=True)
        sys.stdin.read()
    finally:
        server.stop()


if __name__ == "__main__":
    os.environ.pop("CEPH_ARGS", None)
    main()
