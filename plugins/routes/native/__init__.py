"""The native route group: the HTTP API of the rwkv_lightning guide."""

from __future__ import annotations

from fastapi import APIRouter

from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.core.interfaces import RouteGroup
from rwkv_lightning.plugins.routes.native import batch, fim, models, records, state, translate, wire

router = APIRouter()
router.include_router(models.router)
router.include_router(batch.router)
router.include_router(fim.router)
router.include_router(translate.router)
router.include_router(state.router)
router.include_router(records.router)


@hookimpl
def register_routes(register) -> None:  # type: ignore[no-untyped-def]
    register(
        RouteGroup(
            name="native",
            router=router,
            render_error=wire.render_error,
            validation_status=wire.VALIDATION_STATUS,
            claims=(batch.CLAIM,),
            prefixes=("/v2", "/big_batch", "/state", "/multi_state", "/FIM", "/translate"),
        )
    )
