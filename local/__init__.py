"""A real Kubernetes on this machine, for the demo and the tests, from package registries alone.

build.py          one program with every part of Kubernetes, compiled once and kept
tools.py          kubectl and helm
pki.py            a certificate authority, certificates and kubeconfigs
components.py     the command line of every part (pure)
process.py        a process known by pid and start time, and its end
api.py            requests to the API server
cache.py          where built programs are kept; one builder at a time
control_plane.py  etcd, API server, controller manager and scheduler; needs no root
crds.py           applies clora's own resource definitions and waits for them
node.py           a control plane with one real node that runs pods; needs root
node_init.py      the first process inside that node's namespaces
node_config.py    addresses, names and configuration files of that node
volumes.py        a folder of that node for every claim
image.py          container images from folders, without builder or registry

Left out: more than one node, load balancers, ingress, image pulls. None of it is installed with clora.
"""
