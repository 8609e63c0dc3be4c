"""Cluster in a box: nodes as network namespaces on one bridge, each with a link of limited rate. Needs root and
iproute2.

Node k is a namespace with the interface `eth<k>` (10.201.0.k+1, reachable inside the box only), a veth pair to a
bridge and a token bucket on what it sends. Ranks of one node talk over that node's own loopback path, ranks of two
nodes over the link, so real processes meet slow links and fast ones, and the kernel counts every byte on the card.
Frames are of 9000 bytes: at 1500 the wake-ups of a saturated link cost a fifth of a small machine's matmul rate.

    with Netbox(nodes=2, rate="200mbit") as box:
        box.run(2, [sys.executable, "-m", "heptad", "train", "job.toml"])   # 2 ranks a node, torchrun's variables set
        print(box.sent_bytes())                                             # of each node so far

Everything is removed on the way out, whatever happened inside. Read next: `ranks.py` (forked ranks inside a box).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

MTU = 9000
SUBNET = "10.201.0"
CLONE_NEWNET = 0x40000000


class NoNetbox(RuntimeError):
    """This machine cannot make a cluster in a box; the message says what is missing."""


def missing() -> str | None:
    """What keeps this machine from making a box, or None."""
    if os.geteuid() != 0:
        return "a cluster in a box needs root (network namespaces): run `sudo make bench`"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"a cluster in a box needs iproute2: {' and '.join(tools)} not found (package iproute2)"
    return None


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoNetbox(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


class Netbox:
    """`nodes` namespaces whose links send at most `rate` (as `tc` writes it: "200mbit"). A context manager."""

    def __init__(self, nodes: int, rate: str) -> None:
        self.nodes, self.rate = nodes, rate
        self._tag = f"hb{os.getpid()}"  # interface names have at most 15 characters

    def namespace(self, node: int) -> str:
        """Name of a node's network namespace."""
        return f"{self._tag}n{node}"

    def interface(self, node: int) -> str:
        """Name of a node's card inside its namespace."""
        return f"eth{node}"

    def address(self, node: int) -> str:
        """Its address inside the box."""
        return f"{SUBNET}.{node + 1}"

    def __enter__(self) -> Netbox:
        if problem := missing():
            raise NoNetbox(problem)
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    def _up(self) -> None:
        # The bridge lives in a namespace of its own: nothing is added to the machine's own network.
        switch = f"{self._tag}s"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "mtu", str(MTU), "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for node in range(self.nodes):
            space, card = self.namespace(node), self.interface(node)
            _run("ip", "netns", "add", space)
            port = f"p{node}"
            _run(
                *("ip", "-n", switch, "link", "add", port, "mtu", str(MTU), "type", "veth"),
                *("peer", "name", card, "netns", space),
            )
            _run("ip", "-n", space, "link", "set", card, "mtu", str(MTU))
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(node)}/24", "dev", card)
            _run("ip", "-n", space, "link", "set", card, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            shape = ("tbf", "rate", self.rate, "burst", "64kb", "latency", "50ms")
            _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", card, "root", *shape)

    def _down(self) -> None:
        names = [*(self.namespace(node) for node in range(self.nodes)), f"{self._tag}s"]
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def enter(self, node: int) -> None:
        """Move the calling process (one thread so far) into a node: what it opens from now on uses that node's card."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self.namespace(node)}").open() as handle:
            if libc.setns(handle.fileno(), CLONE_NEWNET) != 0:
                raise NoNetbox(f"setns into {self.namespace(node)}: {os.strerror(ctypes.get_errno())}")

    def run(self, per_node: int, argv: Sequence[str], timeout_s: float = 600.0, port: int = 29511) -> None:
        """Run `argv` as `per_node` ranks on every node, torchrun's variables set; raises if a rank fails or is late."""
        world = self.nodes * per_node
        started = []
        try:
            for rank in range(world):
                words = ["ip", "netns", "exec", self.namespace(rank // per_node), *argv]
                variables = self._variables(rank, per_node, port)
                started.append(subprocess.Popen(words, env={**os.environ, **variables}))
            for process in started:
                if process.wait(timeout=timeout_s) != 0:
                    raise RuntimeError(f"a rank of {' '.join(argv)} ended with {process.returncode}")
        finally:
            for process in started:
                process.kill()
                process.wait()

    def _variables(self, rank: int, per_node: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nodes * per_node),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self.interface(rank // per_node),
            "OMP_NUM_THREADS": "1",
        }

    def sent_bytes(self) -> list[int]:
        """Bytes each node's card has sent since the box was made, as the kernel counts them (headers included)."""
        counters = [
            ("ip", "netns", "exec", self.namespace(n), "cat", f"/sys/class/net/{self.interface(n)}/statistics/tx_bytes")
            for n in range(self.nodes)
        ]
        return [int(_run(*words)) for words in counters]
