"""Command line: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import time

import cluster
from cluster import images
from cluster.cluster import Cluster
from cluster.slot import Slot, chosen, search_path


def up(slot: Slot, nodes: int) -> None:
    """Starts a cluster that stays."""
    start = time.monotonic()
    if slot.taken():
        print(f"cluster {slot.number} runs already")
    else:
        Cluster.start(slot, nodes=nodes, owned=False).kubernetes.close()
        print(f"cluster {slot.number}: ready after {time.monotonic() - start:.1f} s")
    print(f"export KUBECONFIG={slot.kubeconfig} PATH={search_path().split(':')[0]}:$PATH")


def down(slot: Slot) -> None:
    """Ends it."""
    if slot.taken():
        Cluster.attach(slot).stop()
    print(f"cluster {slot.number} is down")


def status(slot: Slot) -> None:
    """What runs in the slot."""
    if not slot.taken():
        print(f"cluster {slot.number} is not running")
        return
    found = Cluster.attach(slot)
    for node in found.nodes:
        print(f"{node.name} {node.ip} pods {node.pods} first process {node.pid}")
    print(found.kubernetes.kubectl("get", "nodes,pods", "-A", "-o", "wide"), end="")


def main() -> None:
    """Parses the arguments. kubectl and node replace this process by their command."""
    parser = argparse.ArgumentParser(
        prog="cluster", description=cluster.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["up", "down", "status", "kubectl", "node", "image"])
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    chosen_action = parser.parse_args()
    slot, rest = chosen(), chosen_action.rest
    match chosen_action.action:
        case "up":
            options = argparse.ArgumentParser(prog="cluster up")
            options.add_argument("--nodes", type=int, default=1, choices=range(1, 10), metavar="1..9")
            up(slot, options.parse_args(rest).nodes)
        case "down":
            down(slot)
        case "status":
            status(slot)
        case "kubectl":
            found = Cluster.attach(slot)
            os.execvpe("kubectl", ["kubectl", *rest], found.kubernetes.env())
        case "node":
            nodes = {node.name: node for node in Cluster.attach(slot).nodes}
            node = nodes[rest.pop(0)] if rest and rest[0] in nodes else nodes["node1"]
            os.execvpe(
                "nsenter",
                node.entered(rest or ["bash"]),
                {**os.environ, "PATH": search_path(), "KUBECONFIG": str(slot.kubeconfig)},
            )
        case "image":
            unknown = [name for name in rest if name not in images.ALL]
            if not rest or unknown:
                sys.exit(f"images: {' '.join(images.ALL)}")
            found = Cluster.attach(slot)
            for name in rest:
                image = images.ALL[name]()
                found.import_image(image)
                print(image.name)


if __name__ == "__main__":
    main()
