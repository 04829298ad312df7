"""clora's API: both custom resources, their conditions, and the wire types of the engine's control API.

The only source of truth. The CRD YAML in crds/ and in the chart is generated from it (`python -m clora_api.generate
write`); operator and engine both import it, and it imports neither.
"""

GROUP = "clora.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FINALIZER = f"{GROUP}/release"
