"""Addresses, names and configuration files of the local node. Pure but for writing the files."""

from __future__ import annotations

import json
from pathlib import Path

from local import components, image

NODE = "clora-node"
CGROUP = "clora-node"
# A point-to-point link between this machine and the node; the routes to pods and services lead over it.
HOST_IP, NODE_IP, PREFIX = "10.231.0.1", "10.231.0.2", 30
HOST_LINK, NODE_LINK = "clora-host0", "clora-node0"
PORT = 6443
CNI_PROGRAMS = Path("/usr/lib/cni")
# Inside the node's own mounts: nothing outside can reach it, and its path is short enough for a socket.
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"


def write(folder: Path) -> None:
    """containerd.toml, cni/ and kubelet.json in `folder`."""
    (folder / "containerd.toml").write_text(_containerd(folder))
    (folder / "cni").mkdir(exist_ok=True)
    (folder / "cni" / "10-pods.conflist").write_text(json.dumps(_cni()))
    (folder / "resolv.conf").write_text("")  # there is no cluster DNS
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(folder), indent=1))


def _containerd(folder: Path) -> str:
    """`native` copies an image's few files where overlayfs would not work on every file system."""
    others = ", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in ("aufs", "btrfs", "devmapper", "zfs"))
    return f"""version = 2
root = {json.dumps(str(folder / "containerd"))}
state = "/run/containerd"
disabled_plugins = [{others}]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image.PAUSE}"
  restrict_oom_score_adj = true # may lack the capability to lower scores
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = {json.dumps(str(folder / "cni"))}
"""


def _cni() -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "pods0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,  # a pod may reach itself by its service
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": components.POD_CIDR}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def _kubelet(folder: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(folder / "pki" / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "failSwapOn": False,
        "failCgroupV1": False,
        "readOnlyPort": 0,
        "imageGCHighThresholdPercent": 100,  # images cannot be pulled again
        "localStorageCapacityIsolation": False,  # needs statistics that not every file system gives
        "evictionHard": {"memory.available": "100Mi"},
        "podLogsDir": str(folder / "log" / "pods"),
        "resolvConf": str(folder / "resolv.conf"),
    }
