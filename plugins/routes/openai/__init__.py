"""The OpenAI route group: chat, completions and models as OpenAI's clients expect them."""

from __future__ import annotations

from fastapi import APIRouter

from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.core.interfaces import RouteGroup
from rwkv_lightning.core.rendering import render_openai
from rwkv_lightning.plugins.routes.openai import chat, completions, models

router = APIRouter()
router.include_router(models.router)
router.include_router(chat.router)
router.include_router(completions.router)


@hookimpl
def register_routes(register) -> None:  # type: ignore[no-untyped-def]
    register(
        RouteGroup(
            name="openai", router=router, render_error=render_openai, claims=(chat.CLAIM,), prefixes=("/v1", "/openai")
        )
    )
