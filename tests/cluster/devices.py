"""Made-up GPUs on a node: a device plugin and a DRA driver for its kubelet, and what the kubelet says of who has them.

Both speak the kubelet's own gRPC interfaces (k8s.io/kubelet/pkg/apis) over its sockets, from the test's process: a
socket in the node's mounts is reached by way of its first process. grpcio comes with vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from cluster.kubernetes import Kubernetes, Object
from cluster.node import Node
from servers.waiting import wait_for

#: Resource of the device plugin.
RESOURCE = "nvidia.com/gpu"
#: Name of the DRA driver, and of the class.
DRIVER = "gpu.example.com"
_SECONDS = 10

Field = tuple[int, "str | bytes"]
#: The values of each field number of a message. Nested messages are bytes.
Fields = dict[int, list[bytes]]


def encode(*fields: Field) -> bytes:
    """A protobuf message of strings and messages, which is all that these interfaces need here."""
    parts = []
    for number, value in fields:
        content = value.encode() if isinstance(value, str) else value
        parts += [_varint(number << 3 | 2), _varint(len(content)), content]
    return b"".join(parts)


def decode(message: bytes) -> Fields:
    """Strings and messages of a message by their field numbers. Numbers are skipped."""
    found: Fields = {}
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        length, at = _read_varint(message, at)
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(message[at : at + length])
            at += length
        elif key & 7 != 0:
            raise ValueError(f"a field of wire type {key & 7}")
    return found


def _varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def _call(socket: Path, method: str, request: bytes = b"") -> bytes:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        answer: bytes = channel.unary_unary(method)(request, timeout=_SECONDS, wait_for_ready=True)
        return answer


@contextmanager
def _serving(
    socket: Path, service: str, methods: dict[str, Callable[[bytes], bytes]], **streams: bytes
) -> Iterator[None]:
    """A gRPC server. A stream sends its one message and stays open."""
    ended = threading.Event()

    def unary(method: Callable[[bytes], bytes]) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, _: method(request))

    def stream(message: bytes) -> grpc.RpcMethodHandler:
        def reply(_request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
            yield message
            ended.wait()

        return grpc.unary_stream_rpc_method_handler(reply)

    handlers = {name: unary(method) for name, method in methods.items()}
    handlers |= {name: stream(message) for name, message in streams.items()}
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        ended.set()
        server.stop(0).wait(_SECONDS)
        socket.unlink(missing_ok=True)


@contextmanager
def device_plugin(kubernetes: Kubernetes, node: Node, devices: list[str]) -> Iterator[list[list[str]]]:
    """A device plugin for these GPUs. Yields the devices that it gave to each container, identified by NVIDIA's
    variable.
    """
    given: list[list[str]] = []

    def allocate(request: bytes) -> bytes:
        answers: list[Field] = []
        for container in decode(request).get(1, []):
            names = [name.decode() for name in decode(container).get(1, [])]
            given.append(names)
            variable = encode((1, "NVIDIA_VISIBLE_DEVICES"), (2, ",".join(names)))
            answers.append((1, encode((1, variable))))
        return encode(*answers)

    folder = Path(f"/proc/{node.pid}/root/var/lib/kubelet/device-plugins")
    healthy = encode(*((1, encode((1, name), (2, "Healthy"))) for name in devices))
    methods: dict[str, Callable[[bytes], bytes]] = {"GetDevicePluginOptions": lambda _: b"", "Allocate": allocate}
    with _serving(folder / "made-up.sock", "v1beta1.DevicePlugin", methods, ListAndWatch=healthy):
        plugin = encode((1, "v1beta1"), (2, "made-up.sock"), (3, RESOURCE))
        _call(folder / "kubelet.sock", "/v1beta1.Registration/Register", plugin)

        def offered() -> bool:
            found = kubernetes.request("GET", f"/api/v1/nodes/{node.name}")["status"]["allocatable"]
            return bool(found.get(RESOURCE) == str(len(devices)))

        kubernetes.wait_for(offered, 30, f"{node.name} offers {len(devices)} of {RESOURCE}")
        yield given


@contextmanager
def dra_driver(kubernetes: Kubernetes, node: Node, devices: list[str]) -> Iterator[list[str]]:
    """A DRA driver for these GPUs, with a DeviceClass. Yields the uids of claims that the kubelet has prepared."""
    prepared: list[str] = []
    device = encode((2, node.name), (3, devices[0]))

    def prepare(request: bytes) -> bytes:
        uids = [decode(claim)[2][0].decode() for claim in decode(request).get(1, [])]
        prepared.extend(uids)
        return encode(*((1, encode((1, uid), (2, encode((1, device))))) for uid in uids))

    def unprepare(request: bytes) -> bytes:
        uids = [decode(claim)[2][0].decode() for claim in decode(request).get(1, [])]
        return encode(*((1, encode((1, uid), (2, b""))) for uid in uids))

    registered = threading.Event()

    def notify(request: bytes) -> bytes:
        assert 2 not in decode(request), request
        registered.set()
        return b""

    folder = node.folder / "kubelet"
    endpoint = folder / "plugins" / "made-up.sock"
    endpoint.parent.mkdir(exist_ok=True)
    info = encode((1, "DRAPlugin"), (2, DRIVER), (3, str(endpoint)), (4, "v1.DRAPlugin"))
    methods: dict[str, Callable[[bytes], bytes]] = {
        "NodePrepareResources": prepare,
        "NodeUnprepareResources": unprepare,
    }
    registration: dict[str, Callable[[bytes], bytes]] = {
        "GetInfo": lambda _: info,
        "NotifyRegistrationStatus": notify,
    }
    with (
        _serving(endpoint, "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", methods),
        _serving(folder / "plugins_registry" / "made-up.sock", "pluginregistration.Registration", registration),
    ):
        wait_for(registered.is_set, 30, f"the kubelet of {node.name} takes the driver")
        # Not before: a kubelet without the driver would delete its slices as leftovers.
        kubernetes.apply([_device_class(), _slice(node, devices)])
        yield prepared
        kubernetes.kubectl("delete", "resourceslice,deviceclass", "--all")


def _device_class() -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
    }


def _slice(node: Node, devices: list[str]) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node.name}-{DRIVER}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node.name,
            "pool": {"name": node.name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": name} for name in devices],
        },
    }


def claim_template(name: str) -> Object:
    """One GPU of the driver for each pod with this template. The request is called `gpu`."""
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def held(node: Node, namespace: str, pod: str) -> dict[str, list[str]]:
    """The kubelet's record of a pod's containers: devices of the plugin, and claims by name."""
    socket = node.folder / "kubelet" / "pod-resources" / "kubelet.sock"
    answer = decode(_call(socket, "/v1.PodResourcesLister/List"))
    found: dict[str, list[str]] = {}
    for fields in map(decode, answer.get(1, [])):
        if (fields[1][0].decode(), fields[2][0].decode()) != (pod, namespace):
            continue
        for container in map(decode, fields.get(3, [])):
            devices = [one for part in container.get(2, []) for one in decode(part).get(2, [])]
            claims = [decode(part)[2][0] for part in container.get(5, [])]
            found[container[1][0].decode()] = [one.decode() for one in devices + claims]
    return found
