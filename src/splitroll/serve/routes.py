"""The service's addresses, and what each takes to be asked."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Access(enum.Enum):
    """Who may ask."""

    OPEN = "open"
    """Anybody: whether it lives, and what it is."""
    READ = "read"
    """With the API key."""
    GENERATE = "generate"
    """With the API key; it is work for the engines."""
    ADMIN = "admin"
    """With the admin key: it changes what everybody gets."""


ROUTES: Mapping[str, Mapping[str, Access]] = {
    "/health": {"GET": Access.OPEN},
    "/version": {"GET": Access.OPEN},
    "/v1/models": {"GET": Access.READ},
    "/v1/completions": {"POST": Access.GENERATE},
    "/v1/chat/completions": {"POST": Access.GENERATE},
    "/inference/v1/generate": {"POST": Access.GENERATE},
    "/tokenize": {"POST": Access.READ},
    "/detokenize": {"POST": Access.READ},
    "/openapi.json": {"GET": Access.READ},
    "/metrics": {"GET": Access.READ},
    "/dashboard": {"GET": Access.OPEN},
    "/dashboard/events": {"GET": Access.READ},
    "/dashboard/samples/": {"GET": Access.READ},
    "/server_info": {"GET": Access.READ},
    "/get_world_size": {"GET": Access.READ},
    "/is_paused": {"GET": Access.READ},
    "/weight_info": {"GET": Access.READ},
    "/pause": {"POST": Access.ADMIN},
    "/resume": {"POST": Access.ADMIN},
    "/abort_requests": {"POST": Access.ADMIN},
    "/reset_prefix_cache": {"POST": Access.ADMIN},
    "/init_weight_transfer_engine": {"POST": Access.ADMIN},
    "/shutdown_weight_transfer_engine": {"POST": Access.ADMIN},
    "/start_weight_update": {"POST": Access.ADMIN},
    "/update_weights": {"POST": Access.ADMIN},
    "/finish_weight_update": {"POST": Access.ADMIN},
    "/weight_checker": {"POST": Access.ADMIN},
    "/collective_rpc": {"POST": Access.ADMIN},
}
"""By path and method; whatever is not here does not exist. Of a path that ends with a slash, all
paths that begin so."""


def methods_of(path: str) -> Mapping[str, Access] | None:
    """Return what may be asked of a path, by method; None where there is nothing."""
    folder = path[: path.rfind("/") + 1]
    return ROUTES.get(path) or (ROUTES.get(folder) if folder != path else None)
