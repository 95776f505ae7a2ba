"""Paths that several route groups share: one route owns the path and asks the body whose it is.

path_conflicts.md section 2: the decision depends on which of the groups' keys (`messages`, `contents`) the body
fills, and on nothing else; it fixes defaults, stream form and error form.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from rwkv_lightning.core.body import read_object
from rwkv_lightning.core.errors import BadRequest
from rwkv_lightning.core.http import Call, authenticate, body_in_openapi, context_of

if TYPE_CHECKING:
    from rwkv_lightning.core.interfaces import BodyClaim, RouteGroup

Claimant = tuple["BodyClaim", "RouteGroup"]


def mount_claims(app: FastAPI, groups: list[RouteGroup]) -> None:
    """Add one route per shared path."""
    shared: dict[tuple[str, str], list[Claimant]] = defaultdict(list)
    for group in groups:
        for claim in group.claims:
            shared[claim.method, claim.path].append((claim, group))
    for (method, path), claimants in shared.items():
        _mount(app, method, path, claimants)


def _mount(app: FastAPI, method: str, path: str, claimants: list[Claimant]) -> None:
    fallback = next((c for c in claimants if c[0].fallback), claimants[0])

    async def endpoint(request: Request) -> Response:
        request.state.group = fallback[1]  # renders what goes wrong before the body says whose it is
        body = await read_object(request, context_of(request).settings.max_body_bytes)
        password = body.pop("password", None)
        claim, group = choose(body, claimants, fallback)
        request.state.group = group
        call = Call(request, body, authenticate(request, password, protected=True))
        return await claim.handle(call)

    schemas = [dict(claim.body_schema) for claim, _ in claimants]
    schema = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=f"{method} {path}",
        description="\n\n".join(claim.handle.__doc__ or claim.label for claim, _ in claimants),
        tags=[group.name for _, group in claimants],
        openapi_extra=body_in_openapi(schema),
    )


def choose(body: dict[str, Any], claimants: list[Claimant], fallback: Claimant) -> Claimant:
    """Whose request this is. Raises BadRequest when two groups' keys are filled."""
    filled = [c for c in claimants if body.get(c[0].key) not in (None, [])]
    if len(filled) > 1:
        filled.sort(key=lambda claimant: not claimant[0].fallback)
        keys = " or ".join(f"{claim.key} ({claim.label})" for claim, _ in filled)
        raise BadRequest(f"send either {keys}, not both")
    return filled[0] if filled else fallback
