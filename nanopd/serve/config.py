"""What the user asked of the server and of the router. Frozen, and checked once, like the engine's options."""

from dataclasses import dataclass

from nanopd.config import check, opt, require

_MANY = 2**31 - 1
_POLICIES = ("round_robin", "least_loaded", "prefix_aware")


@dataclass(frozen=True, kw_only=True)
class _HttpConfig:
    """What both have."""

    host: str = opt("127.0.0.1", "Address to listen on; 0.0.0.0: all (then set --api-key).")
    port: int = opt(8000, "Port to listen on; 0: any.", 0, 65535)
    api_key: str | None = opt(None, "Bearer token that clients (and the router) must send; without it anyone may ask.")

    def __post_init__(self) -> None:
        check(self)
        require(self.api_key != "", "--api-key is empty; leave it away to let everybody in.")


@dataclass(frozen=True)
class ServeConfig(_HttpConfig):
    """Options of the HTTP server. Times are seconds."""

    served_model_name: str | None = opt(None, "Name of the model in the API; without it the name of its directory.")
    max_waiting: int = opt(256, "Most requests beyond max_num_seqs; those above it are refused with 429.", 0, _MANY)
    session_timeout: float = opt(600.0, "How long a session may wait for its next input.", 0.01, 1e9)
    shutdown_timeout: float = opt(30.0, "After SIGTERM, how long running requests may still take.", 0.0, 1e6)


@dataclass(frozen=True)
class RouterConfig(_HttpConfig):
    """Options of the router. Times are seconds."""

    prefill: tuple[str, ...] = opt((), "URL of a prefill node (may be given several times).")
    decode: tuple[str, ...] = opt((), "URL of a decode node (may be given several times); at least one.")
    policy: str = opt("prefix_aware", "How to choose a node.", choices=_POLICIES)
    order: str = opt("together", "Ask P and D together, or P first.", choices=("together", "prefill_first"))
    health_interval: float = opt(1.0, "Between two looks at a node's /health.", 0.01, 1e6)
    shutdown_timeout: float = opt(10.0, "After SIGTERM, how long running requests may still take.", 0.0, 1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in (*self.prefill, *(self.decode or ("",))):
            wanted = f"{url!r} is no URL like http://127.0.0.1:8100; and at least one --decode is needed."
            require(url.startswith(("http://", "https://")), wanted)
