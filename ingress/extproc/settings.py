"""Settings of the endpoint picker; part of the ingress's settings."""

from pydantic import Field

from nearkv.settings import Address, SettingsGroup, TlsSettings


class PoolSettings(SettingsGroup):
    """The InferencePool whose pods may be picked; without a name, all engines known may be."""

    name: str = Field("", description="Name of the InferencePool; empty for none.")
    namespace: str = Field("default", description="Its namespace, and that of its pods.")
    kubeconfig: str = Field(
        "", description="Path of a kubeconfig; empty for the pod's service account."
    )
    api_server: str = Field(
        "", description="URL of the API server, without credentials; for tests above all."
    )


class ExtProcSettings(SettingsGroup):
    """The endpoint picker for Envoy; used with mode ext-proc."""

    listen: Address = Field(
        Address("127.0.0.1", 9002), description="Address to serve Envoy on (gRPC)."
    )
    health_listen: Address | None = Field(
        None,
        description="Address of a further gRPC server for probes, without TLS; listen answers "
        "them, too.",
    )
    tls: TlsSettings | None = Field(None, description="TLS towards Envoy.")
    pool: PoolSettings = Field(PoolSettings(), description="Membership.")
    fallback_endpoints: int = Field(
        0,
        ge=0,
        le=8,
        description="Further endpoints named in each pick, in order, for the gateway's retries; "
        "0 for ORIGINAL_DST clusters, which take one address only.",
    )
